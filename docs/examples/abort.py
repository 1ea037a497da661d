"""Three ways to end a request early; the engine is told in each of them."""

import trio

from trio_engine import EngineClient, EngineConfig, RequestOutputKind, SamplingParams, open_engine

CONFIG = EngineConfig(executor="null", null_step_ms=10)
LONG = SamplingParams(max_tokens=1000, output_kind=RequestOutputKind.DELTA)


async def leave_the_block(engine: EngineClient) -> None:
    async with engine.generate([1], LONG) as stream:
        async for delta in stream:
            if delta.num_output_tokens >= 3:
                break
    print("left:", engine.statistics().num_requests, "requests are open")


async def set_a_time_limit(engine: EngineClient) -> None:
    with trio.move_on_after(0.2) as limit:
        await engine.complete([1], LONG)
    print("too late:", limit.cancelled_caught)


async def abort_from_outside(engine: EngineClient) -> None:
    async with engine.generate([1], LONG, request_id="mine") as stream:
        await anext(stream)
        engine.abort("mine")
        last = [delta async for delta in stream][-1]
    print("aborted:", last.finish_reason)


async def main() -> None:
    async with open_engine(CONFIG) as engine:
        await leave_the_block(engine)
        await set_a_time_limit(engine)
        await abort_from_outside(engine)


if __name__ == "__main__":
    trio.run(main)
