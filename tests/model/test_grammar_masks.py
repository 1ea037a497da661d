"""Rows that follow a grammar, on a small model: alone, among others, in either order of calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from tests.model.decoding import RunnerExecutor, load_decoder
from tests.model.tiny_models import make_hf_folder
from trio_engine.checkpoint import ModelFiles
from trio_engine.config import EngineConfig
from trio_engine.core.engine_core import EngineCore
from trio_engine.outputs import FinishReason
from trio_engine.requests import EngineCoreRequest
from trio_engine.sampling_params import SamplingParams, StructuredOutputsParams
from trio_engine.testing.check_executor import CONFIG as CHECK_CONFIG
from trio_engine.testing.check_grammar import check_grammar
from trio_engine.testing.core_driver import CoreDriver
from trio_engine.testing.hashed_grammar import HashedGrammar

if TYPE_CHECKING:
    from trio_engine.core.plan import RowGrammar
    from trio_engine.model.decoder import Decoder
    from trio_engine.testing.core_driver import RequestLog

EOS = 127  # the last of the model
CONFIG = EngineConfig(max_model_len=64, block_size=4, num_blocks=64, max_num_seqs=8)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder, _ = make_hf_folder("llama", tmp_path_factory.mktemp("llama"))
    return load_decoder(ModelFiles("folder", folder))


def grammar_of(decoder: Decoder, num_tokens: int) -> HashedGrammar:
    """Over all tokens but the last, which ends outputs."""
    return HashedGrammar(decoder.config.vocab_size - 1, num_tokens)


@pytest.fixture(params=[False, True], ids=["settled", "ahead"])
def launches_ahead(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def make_driver(decoder: Decoder, *, launches_ahead: bool = False, **limits: Any) -> CoreDriver:
    config = msgspec.structs.replace(CONFIG, **limits)
    executor = RunnerExecutor(decoder, config, launches_ahead=launches_ahead)
    core = EngineCore(config, executor.load(), num_clients=1, clock=lambda: 0.0)

    def compile_hashed(params: StructuredOutputsParams) -> RowGrammar:
        """The regex is the number of tokens."""
        assert params.regex is not None
        return grammar_of(decoder, int(params.regex))

    return CoreDriver(core, executor, compile_grammar=compile_hashed)


def add(driver: CoreDriver, request_id: str, regex: str | None = "9", **options: Any) -> RequestLog:
    structured = None if regex is None else StructuredOutputsParams(regex=regex)
    options = {"temperature": 0.0, "max_tokens": 20, "eos_token_id": EOS, **options}
    params = SamplingParams(structured_outputs=structured, **options)
    log = driver.listen(0, request_id)
    # The prompt follows from the id, so that a request alone is the same request.
    prompt = [5 + len(request_id), *(ord(char) % 90 for char in request_id)]
    driver.core.add(
        EngineCoreRequest(request_id, prompt, None, params, None, 0.0, None, None, None)
    )
    return log


def alone(decoder: Decoder, request_id: str, regex: str | None = "9", **options: Any) -> RequestLog:
    driver = make_driver(decoder)
    log = add(driver, request_id, regex, **options)
    driver.run_until_idle()
    return log


def check(decoder: Decoder, log: RequestLog, num_tokens: int = 9) -> None:
    grammar_of(decoder, num_tokens).check(log.token_ids, [EOS])
    assert (log.finish_reason, len(log.token_ids)) == (FinishReason.STOP, num_tokens + 1)


def test_it_does_what_any_executor_must(decoder: Decoder, launches_ahead: bool) -> None:
    check_grammar(
        lambda config: RunnerExecutor(decoder, config, launches_ahead=launches_ahead),
        CHECK_CONFIG,
    )


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 7, "top_p": 0.9}])
def test_rows_follow_their_grammars_beside_free_ones(
    decoder: Decoder, launches_ahead: bool, options: dict[str, Any]
) -> None:
    driver = make_driver(decoder, launches_ahead=launches_ahead)
    structured = [add(driver, f"s{index}", **options) for index in range(3)]
    free = [add(driver, f"free{index}", None, **options) for index in range(2)]
    driver.run_until_idle()
    for index, log in enumerate(structured):
        check(decoder, log)
        assert log.token_ids == alone(decoder, f"s{index}", **options).token_ids
    for index, log in enumerate(free):
        assert log.token_ids == alone(decoder, f"free{index}", None, **options).token_ids


def test_rows_that_are_preempted_follow_them_all_the_same(
    decoder: Decoder, launches_ahead: bool
) -> None:
    driver = make_driver(decoder, launches_ahead=launches_ahead, num_blocks=18)
    logs = [add(driver, f"r{index}", "30", max_tokens=40) for index in range(4)]
    driver.run_until_idle()
    assert driver.core.statistics().num_preemptions
    for index, log in enumerate(logs):
        check(decoder, log, 30)
        solo = alone(decoder, f"r{index}", "30", max_tokens=40)
        assert log.token_ids == solo.token_ids


def test_raw_logprobs_are_those_after_the_mask(decoder: Decoder, launches_ahead: bool) -> None:
    driver = make_driver(decoder, launches_ahead=launches_ahead)
    log = add(driver, "logprobs", logprobs=-1)
    driver.run_until_idle()
    grammar = grammar_of(decoder, 9)
    lists = [output.new_logprobs for output in log.outputs if output.new_logprobs is not None]
    ids = np.concatenate([found.logprob_token_ids for found in lists])
    values = np.concatenate([found.logprobs for found in lists])
    assert len(values) == len(log.token_ids) == 10
    for place, (row_ids, row) in enumerate(zip(ids, values, strict=True)):
        finite = {int(i) for i, value in zip(row_ids, row, strict=True) if value > -np.inf}
        assert finite == (grammar.may_follow(log.token_ids[:place]) or {EOS})
        assert np.exp(row[1:]).sum() == pytest.approx(1.0, abs=1e-4)


def test_the_end_of_the_grammar_goes_before_min_tokens(
    decoder: Decoder, launches_ahead: bool
) -> None:
    driver = make_driver(decoder, launches_ahead=launches_ahead)
    log = add(driver, "short", "3", min_tokens=12)
    driver.run_until_idle()
    check(decoder, log, 3)


def test_options_that_leave_nothing_of_the_grammar_end_the_request_alone(
    decoder: Decoder, launches_ahead: bool
) -> None:
    driver = make_driver(decoder, launches_ahead=launches_ahead)
    grammar = grammar_of(decoder, 9)
    forbidden = min(set(range(decoder.config.vocab_size)) - grammar.may_follow([]))
    bad = add(driver, "bad", allowed_token_ids=[forbidden])
    good = add(driver, "good")
    driver.run_until_idle()
    assert (bad.finish_reason, bad.token_ids) == (FinishReason.ERROR, [])
    assert "other options leave none" in str(bad.outputs[-1].stop_reason)
    check(decoder, good)
