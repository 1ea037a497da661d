"""The fake engine: what a test wrote down, at the pace of a mock clock. Nothing here takes time."""

from __future__ import annotations

import math
import sys
import threading
from typing import TYPE_CHECKING

import msgspec
import pytest
import trio

from trio_engine.errors import EngineDeadError, RequestError, RequestFailedError
from trio_engine.outputs import FinishReason
from trio_engine.sampling_params import (
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from trio_engine.testing.byte_tokenizer import EOS_TOKEN_ID, make_byte_tokenizer
from trio_engine.testing.check_client import check_client
from trio_engine.testing.check_executor import check_executor
from trio_engine.testing.fake_engine import CONFIG, Asked, FakeEngine, open_fake_engine
from trio_engine.testing.fake_executor import FakeExecutor

if TYPE_CHECKING:
    from trio.testing import MockClock

    from trio_engine.client.base import EngineClient
    from trio_engine.config import EngineConfig
    from trio_engine.executor.base import Executor

LONG = SamplingParams(max_tokens=1000, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
AMPLE = SamplingParams(max_tokens=200)


async def kill(client: EngineClient) -> None:
    assert isinstance(client, FakeEngine)
    client.kill()


async def test_it_is_a_client_like_any_other(autojump_clock: MockClock) -> None:
    await check_client(
        lambda max_in_flight: open_fake_engine(max_in_flight=max_in_flight), kill_engine=kill
    )


def test_its_executor_is_one_like_any_other() -> None:
    def make(config: EngineConfig) -> Executor:
        tokenizer = make_byte_tokenizer()
        return FakeExecutor(
            config,
            encode=tokenizer.encode,
            decode=tokenizer.decode,
            eos_token_id=EOS_TOKEN_ID,
            answer=lambda asked: "answer",
        )

    check_executor(make)


async def test_answers_are_text(autojump_clock: MockClock) -> None:
    async with open_fake_engine("¡Olé! 🦊") as engine:
        output = await engine.complete("Say it.", AMPLE)
        assert output.text == "¡Olé! 🦊"
        assert output.finish_reason is FinishReason.STOP
        assert output.num_output_tokens == len("¡Olé! 🦊".encode()) + 1
        assert output.num_prompt_tokens == len("Say it.")
    async with open_fake_engine() as engine:
        assert (await engine.complete("Say it.", AMPLE)).text == "Say it."


async def test_pieces_of_a_stream_are_whole_characters(autojump_clock: MockClock) -> None:
    params = SamplingParams(max_tokens=200, output_kind=RequestOutputKind.DELTA)
    async with open_fake_engine("a🦊b") as engine, engine.generate("x", params) as stream:
        texts = [item.text async for item in stream if item.text]
    assert texts == ["a", "🦊", "b"]


async def test_a_function_sees_what_was_asked(autojump_clock: MockClock) -> None:
    def answer(asked: Asked) -> str:
        return f"{len(asked.prompt)} {asked.params.max_tokens}"

    async with open_fake_engine(answer) as engine:
        assert (await engine.complete("four", AMPLE)).text == "4 200"
        chat = [{"role": "user", "content": "Hello"}]
        await engine.complete(chat, AMPLE, request_id="mine")
        await engine.complete([65, 66], AMPLE)
        prompts = [asked.prompt for asked in engine.asked]
        assert prompts == ["four", "user: Hello\nassistant: ", "AB"]
        assert engine.asked[1].request_id.startswith("mine-")
        assert engine.asked[2].prompt_token_ids == [65, 66]


async def test_time_is_that_of_the_clock(autojump_clock: MockClock) -> None:
    async with open_fake_engine("x" * 19, tokens_per_s=10, prefill_s=3) as engine:
        started = trio.current_time()
        await engine.complete("hi", AMPLE)
        assert trio.current_time() - started == pytest.approx(3 + 20 / 10)
        started = trio.current_time()
        async with engine.generate("hi", LONG) as stream:
            await anext(stream)
            assert trio.current_time() - started == pytest.approx(3.1)


async def test_requests_run_beside_each_other(autojump_clock: MockClock) -> None:
    async with open_fake_engine("x" * 99, tokens_per_s=10) as engine:
        started = trio.current_time()
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(engine.complete, "hi", AMPLE)
        # The first one may be a step ahead of the others, which come while it runs.
        assert 10.0 <= trio.current_time() - started < 10.15


async def test_without_a_pace_no_time_passes(autojump_clock: MockClock) -> None:
    async with open_fake_engine("x" * 99, tokens_per_s=math.inf) as engine:
        started = trio.current_time()
        await engine.complete("hi", AMPLE)
        assert trio.current_time() == started


async def test_a_time_limit_ends_the_request_in_the_engine(autojump_clock: MockClock) -> None:
    config = msgspec.structs.replace(CONFIG, max_num_seqs=1)
    async with open_fake_engine("x" * 99, tokens_per_s=10, config=config) as engine:
        with trio.move_on_after(5) as scope:
            await engine.complete("hi", AMPLE)
        assert scope.cancelled_caught
        started = trio.current_time()
        await engine.complete("hi", AMPLE)  # the only place is free
        assert trio.current_time() - started < 10.2


async def test_a_full_engine_makes_requests_wait(autojump_clock: MockClock) -> None:
    config = msgspec.structs.replace(CONFIG, max_num_seqs=1, max_waiting_requests=0)
    async with (
        open_fake_engine("x" * 9, tokens_per_s=10, config=config) as engine,
        engine.generate("hi", LONG) as stream,
    ):
        await anext(stream)
        with pytest.raises(RequestFailedError, match="wait for a slot"):
            await engine.complete("hi", AMPLE)


async def test_an_error_of_the_function_ends_that_request_only(autojump_clock: MockClock) -> None:
    def answer(asked: Asked) -> str:
        if "bad" in asked.prompt:
            raise ValueError("I do not like this")
        return "fine"

    async with (
        open_fake_engine(answer) as engine,
        engine.generate("good", SamplingParams(max_tokens=200)) as stream,
    ):
        with pytest.raises(RequestFailedError, match="I do not like this"):
            await engine.complete("bad", AMPLE)
        assert [item async for item in stream][-1].text == "fine"
        assert [asked.prompt for asked in engine.asked] == ["good", "bad"]


async def test_its_death_is_that_of_an_engine(autojump_clock: MockClock) -> None:
    async with open_fake_engine() as engine:
        engine.kill("out of memory")  # while idle
        death = await engine.wait_dead()
        assert engine.is_dead
        assert "out of memory" in repr(death.__cause__ and death.__cause__.__cause__)
        with pytest.raises(EngineDeadError):
            await engine.complete("hi")


async def test_min_tokens_and_an_empty_answer(autojump_clock: MockClock) -> None:
    async with open_fake_engine("") as engine:
        assert (await engine.complete("x", AMPLE)).text == ""
        output = await engine.complete("x", SamplingParams(max_tokens=9, min_tokens=5))
        assert output.text == " " * 5


async def test_calls_are_answered_as_an_engine_does(autojump_clock: MockClock) -> None:
    async with open_fake_engine("x" * 50) as engine, engine.generate("hi", LONG) as stream:
        await anext(stream)
        await engine.call_utility("pause_scheduler", "keep", False)
        assert await engine.call_utility("is_scheduler_paused")
        with trio.move_on_after(1000) as scope:
            await engine.complete("hi", AMPLE)  # hangs, as behind a stuck engine
        assert scope.cancelled_caught
        await engine.call_utility("resume_scheduler")
        await engine.complete("hi", AMPLE)
        await engine.call_utility("sleep", 1)
        await engine.call_utility("wake_up")


async def test_what_it_cannot_do_is_refused(autojump_clock: MockClock) -> None:
    async with open_fake_engine() as engine:
        params = SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True))
        with pytest.raises(RequestError, match="structured_outputs"):
            await engine.complete("hi", params)
        (ready,) = engine.engines.values()
        assert ready is not None
        assert ready.max_model_len == 2048


async def test_long_texts_start_no_thread(autojump_clock: MockClock) -> None:
    before = set(threading.enumerate())
    config = msgspec.structs.replace(CONFIG, max_model_len=40_000)
    async with open_fake_engine("fine", config=config) as engine:
        assert (await engine.complete("x" * 20_000, AMPLE)).text == "fine"
    assert set(threading.enumerate()) <= before


def test_every_byte_is_a_token() -> None:
    tokenizer = make_byte_tokenizer()
    text = "".join(map(chr, range(0x300))) + "🦊"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.vocab_size == EOS_TOKEN_ID + 1
    assert tokenizer.eos_token_id == EOS_TOKEN_ID
    assert "tokenizers" in sys.modules
