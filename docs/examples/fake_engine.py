"""A service, and its test with a fake engine: a minute of virtual time passes in a moment."""

import logging

import trio
from trio.testing import MockClock

from trio_engine import EngineClient, EngineDeadError, SamplingParams
from trio_engine.testing.fake_engine import Asked, open_fake_engine


async def summarize(engine: EngineClient, text: str) -> str:
    """The service: it gives up after a minute, and when its engine has died."""
    try:
        with trio.fail_after(60):
            prompt = [{"role": "user", "content": f"Summarize: {text}"}]
            return (await engine.complete(prompt, SamplingParams(max_tokens=500))).text
    except trio.TooSlowError:
        return "(too slow)"
    except EngineDeadError:
        return "(try again later)"


def answer(asked: Asked) -> str:
    return "x" * 490 if "a long story" in asked.prompt else "It rains."


async def main() -> None:
    async with open_fake_engine(answer, tokens_per_s=5) as engine:
        started = trio.current_time()
        print(await summarize(engine, "the weather"))
        print(f"took {trio.current_time() - started:.0f} s")
        print(await summarize(engine, "a long story"))
        print("open requests:", engine.statistics().num_requests)
        print("asked:", engine.asked[0].prompt.splitlines()[0])
        engine.kill()
        print(await summarize(engine, "the weather"))


if __name__ == "__main__":
    logging.getLogger("trio_engine").addHandler(logging.NullHandler())  # it tells of the death
    trio.run(main, clock=MockClock(autojump_threshold=0))
