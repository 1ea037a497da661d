"""Grammars that would do harm: tried in a process that may overflow, eat memory or never end."""

from __future__ import annotations

import os
import signal
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trio_engine.config import EngineConfig
from trio_engine.engine import guarded_compiler
from trio_engine.engine.grammar_trial import STACK_OVERFLOW, TrialProcess
from trio_engine.engine.guarded_compiler import GuardedCompiler
from trio_engine.errors import ModelError, RequestError
from trio_engine.sampling_params import StructuredOutputsParams
from trio_engine.structured.source import grammar_source
from trio_engine.structured.trial import TOO_MUCH_MEMORY
from trio_engine.structured.vocabulary import Vocabulary, byte_vocabulary

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

VOCAB_SIZE = 300
TIMEOUT_S = 100.0
CONFIG = EngineConfig(executor="null", grammar_timeout_s=20.0)


@pytest.fixture(autouse=True)
def no_trial_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine must not decide which process is kept."""
    monkeypatch.setattr(guarded_compiler, "KEEP_TRIAL_S", TIMEOUT_S)


@asynccontextmanager
async def open_compiler(
    config: EngineConfig = CONFIG, within_s: float = TIMEOUT_S
) -> AsyncIterator[GuardedCompiler]:
    compiler = GuardedCompiler(config, VOCAB_SIZE)
    with trio.fail_after(within_s):
        try:
            yield compiler
        finally:
            await compiler.aclose()


def ask(**fields: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(**fields)


def refers(num_levels: int) -> dict[str, Any]:
    """A schema whose definitions refer to each other in a chain."""
    definitions: dict[str, Any] = {
        f"d{level}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/d{level + 1}"}}}
        for level in range(num_levels)
    }
    return {"$defs": {**definitions, f"d{num_levels}": {"type": "null"}}, "$ref": "#/$defs/d0"}


# The time of a schema like this grows with its square at least, and then some.
ENDLESS = {
    "type": "object",
    "minProperties": 1,
    "properties": {f"k{number}": {"type": "integer"} for number in range(2000)},
    "additionalProperties": False,
}
GREEDY = {"type": "integer", "multipleOf": 100_000_007}


async def refusal(compiler: GuardedCompiler, params: StructuredOutputsParams) -> str:
    with pytest.raises(RequestError) as caught:
        await compiler.compile(params)
    return str(caught.value)


async def test_what_passes_is_compiled_and_known_from_then_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with open_compiler() as compiler:
        params = ask(json={"type": "object"})
        first = await compiler.compile(params)
        matcher = first.start([], [0])
        assert (matcher.is_over, matcher.failure) == (False, None)
        # From here on no process would start.
        monkeypatch.setattr(TrialProcess, "start", None)
        assert compiler._idle_trial is not None
        await compiler._idle_trial.aclose()
        compiler._idle_trial = None
        second = await compiler.compile(params)
        assert second is not first
        with pytest.raises(TypeError):
            await compiler.compile(ask(regex="other"))


async def test_one_process_tries_one_after_the_other() -> None:
    async with open_compiler() as compiler:
        await compiler.compile(ask(regex="a"))
        trial = compiler._idle_trial
        assert trial is not None
        assert "unclosed group" in await refusal(compiler, ask(regex="(a"))
        await compiler.compile(ask(regex="b"))
        assert compiler._idle_trial is trial


async def test_several_are_tried_at_once_and_one_process_stays() -> None:
    async with open_compiler() as compiler:
        async with trio.open_nursery() as nursery:
            for regex in ("a", "b", "c"):
                nursery.start_soon(compiler.compile, ask(regex=regex))
        assert compiler._idle_trial is not None
        assert compiler._idle_trial.is_alive


async def test_a_process_whose_trial_took_long_is_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(guarded_compiler, "KEEP_TRIAL_S", 0.0)
    async with open_compiler() as compiler:
        await compiler.compile(ask(regex="a"))
        assert compiler._idle_trial is None


async def test_a_schema_that_overflows_the_stack_is_refused_and_the_next_compiles() -> None:
    async with open_compiler() as compiler:
        await compiler.compile(ask(json=refers(20)))
        assert await refusal(compiler, ask(json=refers(1500))) == STACK_OVERFLOW
        await compiler.compile(ask(regex="a"))


@pytest.mark.slow
async def test_a_schema_that_takes_all_memory_is_refused() -> None:
    config = EngineConfig(executor="null", grammar_timeout_s=120.0)
    async with open_compiler(config, within_s=150.0) as compiler:
        assert await refusal(compiler, ask(json=GREEDY)) == TOO_MUCH_MEMORY
        await compiler.compile(ask(regex="a"))


async def test_a_schema_that_takes_too_long_is_refused_in_time_and_its_process_ends() -> None:
    async with open_compiler() as compiler:
        await compiler.compile(ask(regex="a"))
        trial = compiler._idle_trial
        assert trial is not None
        # Set only now, as what was to pass needs more. Short, or memory ends first somewhere.
        compiler._config = EngineConfig(executor="null", grammar_timeout_s=0.25)
        while compiler._idle_trial is trial:  # on a busy machine the time may end before it begins
            started_s = time.monotonic()
            why = await refusal(compiler, ask(json=ENDLESS))
            assert why == "compiling it takes more than 0.25 s"
            assert time.monotonic() - started_s >= 0.25
        assert not trial.is_alive
        assert compiler.num_abandoned_threads == 0


async def test_cancelling_ends_the_process_that_tries() -> None:
    async with open_compiler() as compiler:
        await compiler.compile(ask(regex="a"))
        trial = compiler._idle_trial
        assert trial is not None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(compiler.compile, ask(json=ENDLESS))
            while compiler._idle_trial is trial:  # noqa: ASYNC110  # nobody is told of its job
                await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
        assert not trial.is_alive
        await compiler.compile(ask(regex="b"))


async def test_a_process_that_was_killed_while_idle_is_replaced() -> None:
    async with open_compiler() as compiler:
        await compiler.compile(ask(regex="a"))
        trial = compiler._idle_trial
        assert trial is not None
        os.kill(trial._process.pid, signal.SIGKILL)
        await trial._process.wait()
        await compiler.compile(ask(regex="b"))
        assert compiler._idle_trial is not trial


async def test_after_the_end_no_process_stays() -> None:
    async with open_compiler() as compiler:
        await compiler.aclose()
        await compiler.compile(ask(regex="a"))
        assert compiler._idle_trial is None


async def test_a_process_ends_with_its_input_also_in_the_middle_of_a_job() -> None:
    with trio.fail_after(TIMEOUT_S):
        vocabulary = byte_vocabulary(VOCAB_SIZE)
        trial = await TrialProcess.start(vocabulary)
        async with trio.open_nursery() as nursery:
            source = grammar_source(ask(json=ENDLESS), vocabulary, 1 << 20)
            nursery.start_soon(trial.try_grammar, source)
            await wait_all_tasks_blocked()  # the job is in the pipe, or further
            nursery.cancel_scope.cancel()
        await trial._jobs.aclose()
        assert await trial._process.wait() == 0
        await trial.aclose()


async def test_a_vocabulary_that_grammars_cannot_use_is_an_error_of_the_model() -> None:
    vocabulary = Vocabulary(tokens=[], special_token_ids=[])
    with trio.fail_after(TIMEOUT_S), pytest.raises(ModelError, match="process that tries grammars"):
        await TrialProcess.start(vocabulary)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (EngineConfig(executor="null", tokenizer="/no/such"), "/no/such"),
        (EngineConfig(executor="null"), "a vocabulary of bytes has 257 tokens"),
    ],
)
async def test_an_engine_without_a_vocabulary_has_no_grammars(
    config: EngineConfig, message: str
) -> None:
    compiler = GuardedCompiler(config, 100)
    with trio.fail_after(TIMEOUT_S):
        for _ in range(2):
            with pytest.raises(ModelError, match=message):
                await compiler.compile(ask(regex="a"))


async def test_a_source_beyond_the_limit_costs_nothing() -> None:
    async with open_compiler(EngineConfig(executor="null", max_grammar_bytes=200)) as compiler:
        why = await refusal(compiler, ask(regex="a" * 300))
        assert "at most 200 are served" in why
        assert compiler._idle_trial is None
