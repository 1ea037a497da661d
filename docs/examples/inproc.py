"""An engine in this process, for tests: the client of ``open_engine``, without a second process."""

import trio

from trio_engine import EngineConfig, SamplingParams, open_inproc_engine
from trio_engine.executor.null import NullExecutor

CONFIG = EngineConfig(executor="null", null_step_ms=2)


async def main() -> None:
    async with open_inproc_engine(CONFIG, NullExecutor) as engine:
        output = await engine.complete([1, 2, 3], SamplingParams(max_tokens=4))
        print(output.token_ids, output.finish_reason)
        statistics = await engine.engine_statistics()
        print(statistics.num_steps, "steps,", statistics.num_running_requests, "requests left")


if __name__ == "__main__":
    trio.run(main)
