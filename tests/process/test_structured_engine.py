"""Structured output through client and engine process, without a model: tokens are bytes."""

from __future__ import annotations

import json
import os
import re
import signal
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.process.processes import child_pids, children_of, wait_ended
from tests.process.test_guarded_compiler import ENDLESS, refers
from trio_engine.bench.engine import process_cpu_s
from trio_engine.client.inproc_client import open_inproc_engine
from trio_engine.client.launcher import open_engine
from trio_engine.config import EngineConfig
from trio_engine.engine.grammar_trial import STACK_OVERFLOW
from trio_engine.errors import RequestFailedError
from trio_engine.executor.null import NullExecutor
from trio_engine.outputs import FinishReason
from trio_engine.sampling_params import SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from trio_engine.client.base import EngineClient
    from trio_engine.client.outputs import RequestOutput

TEST_TIMEOUT_S = 100.0
# A byte is its token's id less one; 0 is a special token, and ends an output here.
EOS = 0
CONFIG = EngineConfig(executor="null", null_step_ms=1.0, max_model_len=256, grammar_timeout_s=30.0)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 2, "maxLength": 8},
        "ages": {
            "type": "array",
            "items": {"type": "integer", "minimum": 1, "maximum": 50},
            "minItems": 2,
            "maxItems": 4,
        },
        "kind": {"enum": ["a", "b", None]},
    },
    "required": ["name", "ages", "kind"],
    "additionalProperties": False,
}


TOO_MUCH = "structured_outputs.json: compiling it takes"


def ask(max_tokens: int = 200, eos_token_id: int | None = EOS, **fields: Any) -> SamplingParams:
    return SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        eos_token_id=eos_token_id,
        ignore_eos=eos_token_id is None,
        structured_outputs=StructuredOutputsParams(**fields),
    )


def text_of(output: RequestOutput) -> str:
    return bytes(token - 1 for token in output.token_ids if token != EOS).decode()


async def complete(engine: EngineClient, params: SamplingParams, first: int = 1) -> str:
    output = await engine.complete([first, 2, 3], params)
    assert output.finish_reason is FinishReason.STOP, output
    return text_of(output)


async def failure(engine: EngineClient, params: SamplingParams) -> str:
    with pytest.raises(RequestFailedError) as caught:
        await engine.complete([1], params)
    return str(caught.value.reason)


async def test_every_kind_is_followed_and_ends_with_stop() -> None:
    tag = {
        "structures": [{"begin": "<f>", "schema": {"enum": [1]}, "end": "</f>"}],
        "triggers": ["<f>"],
    }
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_engine(CONFIG) as engine:
            compact = {"disable_any_whitespace": True}  # the executor would draw nothing else
            text = await complete(engine, ask(json=SCHEMA, **compact))
            jsonschema.validate(json.loads(text), SCHEMA)
            # Nothing bounds a string of it, so the executor may never come to its end.
            output = await engine.complete([1, 2, 3], ask(json_object=True, **compact))
            assert text_of(output).startswith("{")
            assert re.fullmatch(r"[a-f]{3}\d", await complete(engine, ask(regex=r"[a-f]{3}\d")))
            assert await complete(engine, ask(choice=["left", "right"])) in ("left", "right")
            grammar = 'root ::= "(" item ")"\nitem ::= "x" | "y"'
            assert await complete(engine, ask(grammar=grammar)) in ("(x)", "(y)")
            assert await complete(engine, ask(structural_tag=json.dumps(tag))) == ""
            assert await complete(engine, ask(eos_token_id=None, regex="abc")) == "abc"


async def test_a_hostile_schema_ends_its_own_request_and_holds_up_nobody() -> None:
    config = EngineConfig(executor="null", null_step_ms=1.0, grammar_timeout_s=10.0)
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_engine(config) as engine, trio.open_nursery() as nursery:
            ended: list[str] = []

            async def run(name: str, params: SamplingParams) -> None:
                if name == "endless":
                    why = await failure(engine, params)
                    # Whichever limit is reached first on this machine.
                    limits = ("10 s", "256 MB")
                    assert why in [f"{TOO_MUCH} more than {limit}" for limit in limits]
                elif name == "deep":
                    why = await failure(engine, params)
                    assert why == f"structured_outputs.json: {STACK_OVERFLOW}"
                else:
                    await engine.complete([1], params)
                ended.append(name)

            nursery.start_soon(run, "endless", ask(json=ENDLESS))
            nursery.start_soon(run, "deep", ask(json=refers(1500)))
            for index in range(4):
                nursery.start_soon(run, "structured", ask(regex=f"[a-z]{{{index + 1}}}"))
                nursery.start_soon(run, "free", SamplingParams(max_tokens=20))
        assert len(ended) == 10


async def test_what_is_no_grammar_ends_its_request_with_the_reason() -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_engine(CONFIG) as engine:
            why = await failure(engine, ask(regex="(a"))
            assert why.startswith("structured_outputs.regex: ")
            assert "unclosed group" in why
            why = await failure(engine, ask(json={"not": {}}))
            assert why.startswith("structured_outputs.json: ")
            assert await complete(engine, ask(regex="a")) == "a"


async def test_leaving_a_stream_while_it_compiles_leaves_nothing_behind() -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_engine(CONFIG) as engine:
            for _ in range(6):  # more than compile at once
                async with engine.generate([1], ask(json=ENDLESS)):
                    await wait_all_tasks_blocked()
            assert await complete(engine, ask(regex="a")) == "a"


def engine_pid(before: set[int]) -> int:
    (pid,) = child_pids() - before
    return pid


async def wait_trial(pid: int) -> int:
    """Waits until an engine has a process that tries a grammar."""
    while not (found := children_of(pid)):  # noqa: ASYNC110  # nobody is told of them
        await trio.sleep(0.01)
    (trial,) = found
    return trial


async def wait_busy(pid: int, quiet_s: float) -> None:
    """Waits until an engine compiles that had used ``quiet_s`` when it had nothing to do."""
    while process_cpu_s(pid) < quiet_s + 0.04:  # noqa: ASYNC110  # nobody is told of it
        await trio.sleep(0.01)


async def test_an_engine_that_is_asked_to_stop_does_not_wait_for_a_grammar() -> None:
    before = child_pids()
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_engine(CONFIG) as engine:
            pid = engine_pid(before)
            async with engine.generate([1], ask(json=ENDLESS)) as stream:
                trial = await wait_trial(pid)
                os.kill(pid, signal.SIGTERM)
                outputs = [output async for output in stream]
                assert outputs[-1].finish_reason is FinishReason.ABORT
                with trio.fail_after(10):  # of 30 that the grammar may take
                    end = await engine.wait_dead()
            assert end.was_asked_to_stop
        await wait_ended(trial)


async def test_a_drain_waits_for_a_grammar_and_its_request() -> None:
    config = EngineConfig(executor="null", null_step_ms=1.0, shutdown_timeout_s=30.0)
    before = child_pids()
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_engine(config) as engine:
            pid = engine_pid(before)
            # The first one starts a process, which takes its time.
            async with engine.generate([1], ask(regex="abc")) as stream:
                await wait_trial(pid)
                os.kill(pid, signal.SIGTERM)
                outputs = [output async for output in stream]
            assert outputs[-1].finish_reason is FinishReason.STOP
            assert text_of(outputs[-1]) == "abc"
            assert (await engine.wait_dead()).was_asked_to_stop


async def test_a_killed_engine_leaves_no_process_that_tries() -> None:
    before = child_pids()
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_engine(CONFIG) as engine:
            pid = engine_pid(before)
            async with engine.generate([1], ask(json=ENDLESS)):
                trial = await wait_trial(pid)
                os.kill(pid, signal.SIGKILL)
                await wait_ended(trial)


@pytest.mark.slow
async def test_an_engine_ends_well_beside_a_thread_that_compiles_for_nobody() -> None:
    """Known from the first time, the schema goes straight to a thread the second time."""
    schema = {"type": "integer", "multipleOf": 100_003}
    config = EngineConfig(executor="null", null_step_ms=1.0, grammar_timeout_s=60.0)
    before = child_pids()
    with trio.fail_after(2 * TEST_TIMEOUT_S):
        async with open_engine(config) as engine:
            pid = engine_pid(before)
            await engine.complete([1], ask(json=schema, max_tokens=1))
            quiet_s = process_cpu_s(pid)
            async with engine.generate([1], ask(json=schema)):
                await wait_busy(pid, quiet_s)
                os.kill(pid, signal.SIGTERM)
                end = await engine.wait_dead()
            assert end.was_asked_to_stop


async def test_an_engine_in_this_process_serves_them_too() -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_inproc_engine(CONFIG, NullExecutor) as engine:
            assert await complete(engine, ask(regex="ab")) == "ab"
            async with engine.generate([1], ask(json=ENDLESS)):
                await wait_all_tasks_blocked()
