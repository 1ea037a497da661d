"""Several requests at once: one engine, one task for each."""

import trio

from trio_engine import EngineClient, EngineConfig, SamplingParams, open_engine

CONFIG = EngineConfig(executor="null", null_step_ms=2)


async def ask(engine: EngineClient, number: int) -> None:
    output = await engine.complete([number], SamplingParams(max_tokens=4))
    print(f"{number}: {output.token_ids} {output.finish_reason}")


async def main() -> None:
    async with open_engine(CONFIG) as engine, trio.open_nursery() as nursery:
        for number in range(3):
            nursery.start_soon(ask, engine, number)


if __name__ == "__main__":
    trio.run(main)
