"""Client and engine process together, with the executor that runs no model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import msgspec
import numpy as np
import pytest
import trio

from tests.process.processes import child_pids
from trio_engine.client.launcher import connect_engine, open_engine
from trio_engine.config import EngineConfig
from trio_engine.errors import EngineDeadError, EngineStartError, RequestFailedError
from trio_engine.executor.kv_checking import HIDDEN_SIZE
from trio_engine.outputs import FinishReason
from trio_engine.sampling_params import RequestOutputKind, SamplingParams
from trio_engine.text.embeds_prompt import EmbedsPrompt
from trio_engine.transport.ipc import IpcDirectory

TEST_TIMEOUT_S = 100.0
NULL = EngineConfig(executor="null", null_step_ms=1.0, num_blocks=64, max_model_len=256)
LONG = SamplingParams(output_kind=RequestOutputKind.DELTA, max_tokens=200, ignore_eos=True)


async def test_requests_utilities_and_an_orderly_end() -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_engine(NULL) as engine:
            output = await engine.complete([1, 2, 3], SamplingParams(max_tokens=5))
            assert len(output.token_ids) == 5
            assert output.finish_reason is FinishReason.LENGTH
            assert output.num_cached_tokens == 0
            async with engine.generate([1], LONG) as stream:
                async for delta in stream:
                    if delta.num_output_tokens > 3:
                        break
            assert await engine.call_utility("get_supported_tasks") == ["generate"]


@pytest.mark.slow
async def test_log_probabilities_and_embeddings_cross_the_wire() -> None:
    """Rows that an array alone carries, and small ones inline; embeddings of either size."""
    config = EngineConfig(executor="kv-checking", num_blocks=64, max_model_len=256)
    params = SamplingParams(max_tokens=40, logprobs=2, temperature=0.0)
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_engine(config) as engine:
            outputs = []
            for num_tokens in (2, 30):
                embeds = np.ones((num_tokens, HIDDEN_SIZE), np.float32)
                prompt = EmbedsPrompt(embeds=embeds)
                outputs.append(await engine.complete(prompt, params))
                assert outputs[-1].num_prompt_tokens == num_tokens
            asked = SamplingParams(max_tokens=1, logprob_token_ids=[4, 5], prompt_logprobs=1)
            outputs.append(await engine.complete([7, 8, 9], asked))
    for output in outputs:
        assert output.logprobs is not None
        width = output.logprobs.logprobs.shape[1]
        assert output.logprobs.logprobs.shape == (len(output.token_ids), width)
        assert output.logprobs.logprob_token_ids[:, 0].tolist() == output.token_ids
    assert outputs[0].token_ids != outputs[1].token_ids
    assert outputs[2].logprobs is not None
    assert outputs[2].logprobs.logprob_token_ids[0, 1:].tolist() == [4, 5]
    assert outputs[2].prompt_logprobs is not None
    assert outputs[2].prompt_logprobs.logprob_token_ids.to_numpy()[:, 0].tolist() == [8, 9]
    assert outputs[0].prompt_logprobs is None


@pytest.mark.slow
async def test_a_request_that_the_engine_refuses_fails() -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_engine(NULL) as engine:
            with pytest.raises(RequestFailedError):
                await engine.complete([1 << 40])
            assert (await engine.complete([1], SamplingParams(max_tokens=1))).finished


@pytest.mark.slow
async def test_sigterm_from_outside_is_a_stop_and_no_crash(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = child_pids()
    # 200 steps, of which the signal comes in the second.
    config = msgspec.structs.replace(NULL, null_step_ms=50.0)
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_engine(config) as engine, engine.generate([1], LONG) as stream:
            await anext(stream)
            (pid,) = child_pids() - before
            os.kill(pid, signal.SIGTERM)
            outputs = [output async for output in stream]
            assert outputs[-1].finish_reason is FinishReason.ABORT
            end = await engine.wait_dead()
            assert end.was_asked_to_stop
            assert str(end) == "the engine was asked to stop (exit status 0)"
            assert engine.is_dead  # nothing is answered any more
            with pytest.raises(EngineDeadError, match="asked to stop"):
                await engine.complete([1])
    assert "engine_stopped" in caplog.text
    assert "engine_dead" not in caplog.text


@pytest.mark.slow
async def test_a_model_that_is_not_there_is_a_start_error() -> None:
    with trio.fail_after(TEST_TIMEOUT_S):
        with pytest.raises(EngineStartError, match="exit status 2"):
            await open_and_leave(EngineConfig(model="/no/such/model"))


async def open_and_leave(config: EngineConfig) -> None:
    async with open_engine(config):
        pass


@pytest.mark.slow
async def test_in_front_of_an_engine_started_elsewhere() -> None:
    """Leaving lets it run and aborts what is open there."""
    with trio.fail_after(TEST_TIMEOUT_S), IpcDirectory() as directory:
        address = directory.address("handshake")
        command = [sys.executable, "-m", "trio_engine.engine", "--executor=null", "--headless"]
        process = await trio.lowlevel.open_process(
            [*command, "--handshake-address", address], stderr=subprocess.DEVNULL
        )
        try:
            async with connect_engine(address) as engine, engine.generate([1], LONG) as stream:
                assert (await anext(stream)).token_ids
            assert process.poll() is None
        finally:
            process.terminate()
            await process.wait()
        assert process.returncode == 0
