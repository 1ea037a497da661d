"""An engine that is asked to stop: it finishes what it has and takes nothing new."""

import trio

from trio_engine import EngineConfig, RequestOutputKind, SamplingParams, connect_engine
from trio_engine.engine.engine_core_proc import EngineCoreProc, EngineIdentity
from trio_engine.executor.null import NullExecutor
from trio_engine.transport.ipc import IpcDirectory

CONFIG = EngineConfig(executor="null", null_step_ms=10, shutdown_timeout_s=5)
PARAMS = SamplingParams(max_tokens=20, output_kind=RequestOutputKind.DELTA)


async def main() -> None:
    with IpcDirectory() as directory:
        address = directory.address("handshake")
        proc = EngineCoreProc(
            CONFIG,
            NullExecutor,
            handshake_address=address,
            identity=EngineIdentity(local=False, headless=True),
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(proc.run)
            async with (
                connect_engine(address) as engine,
                engine.generate([1], PARAMS) as running,
            ):
                await anext(running)
                proc.shutdown.request("the end of the example")
                refused = await engine.complete([2], PARAMS)
                last = [delta async for delta in running][-1]
    print("new request:", refused.finish_reason)
    print("running request:", last.finish_reason, "after", last.num_output_tokens, "tokens")


if __name__ == "__main__":
    trio.run(main)
