"""Tokens per second through client, wire and engine, with an executor that runs no model.

    python docs/examples/measure.py [REQUESTS] [TOKENS] [STEP_MS]

REQUESTS run at once; each is a stream of TOKENS tokens; a step takes STEP_MS milliseconds.
"""

import sys

import trio

from trio_engine import EngineClient, EngineConfig, RequestOutputKind, SamplingParams, open_engine


async def read_stream(engine: EngineClient, num_tokens: int) -> None:
    params = SamplingParams(max_tokens=num_tokens, output_kind=RequestOutputKind.DELTA)
    async with engine.generate([1] * 32, params) as stream:
        async for _ in stream:
            pass


async def main(num_requests: int, num_tokens: int, step_ms: float) -> None:
    config = EngineConfig(executor="null", null_step_ms=step_ms)
    async with open_engine(config) as engine:
        await read_stream(engine, num_tokens)  # warms up both processes
        started = trio.current_time()
        async with trio.open_nursery() as nursery:
            for _ in range(num_requests):
                nursery.start_soon(read_stream, engine, num_tokens)
        elapsed_s = trio.current_time() - started
    print(f"{num_requests * num_tokens / elapsed_s:.0f} tokens/s in {elapsed_s:.2f} s")


if __name__ == "__main__":
    requests, tokens, step = (sys.argv[1:] + ["32", "128", "2"][len(sys.argv) - 1 :])[:3]
    trio.run(main, int(requests), int(tokens), float(step))
