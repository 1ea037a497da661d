"""A service whose engine is started again when it dies. Ctrl-C ends it."""

import trio

from trio_engine import EngineClient, EngineConfig, EngineDeadError, SamplingParams, open_engine

CONFIG = EngineConfig(executor="null", null_step_ms=5)


async def serve(engine: EngineClient) -> None:
    """Stands for the service: one request after the other."""
    while True:
        try:
            output = await engine.complete([1, 2, 3], SamplingParams(max_tokens=20))
        except EngineDeadError:
            print("this request failed", flush=True)  # and its caller is told so
            return
        print(f"served {output.num_output_tokens} tokens", flush=True)


async def main() -> None:
    while True:
        async with open_engine(CONFIG) as engine, trio.open_nursery() as nursery:
            nursery.start_soon(serve, engine)
            death = await engine.wait_dead()
        print(f"engine died with status {death.exit_status}, starting another", flush=True)


if __name__ == "__main__":
    try:
        trio.run(main)
    except* KeyboardInterrupt:
        pass
