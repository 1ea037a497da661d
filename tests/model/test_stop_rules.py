"""What ends an answer, from a caller's options to the text that he reads.

The options are settled as a client does, cross the wire, and run on a model whose next token is
forced by ``logit_bias``; what comes back is read as a client reads it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import tokenizers

from tests.model.decoding import RunnerExecutor, load_decoder
from tests.model.tiny_models import make_hf_folder
from trio_engine.checkpoint import ModelFiles
from trio_engine.config import EngineConfig
from trio_engine.errors import RequestError
from trio_engine.outputs import FinishReason
from trio_engine.requests import EngineCoreRequest
from trio_engine.sampling_params import SamplingParams
from trio_engine.testing.core_driver import CoreDriver
from trio_engine.testing.requests import make_core, make_request
from trio_engine.text.request_text import RequestText
from trio_engine.text.settle import RequestLimits, settle_params
from trio_engine.text.tokenizer import Tokenizer
from trio_engine.wire.codec import RequestDecoder, RequestEncoder

if TYPE_CHECKING:
    from trio_engine.model.decoder import Decoder

pytestmark = pytest.mark.known_fault(kind="lost-stop-rule")

VOCAB_SIZE = 128
EOS, FURTHER_EOS, STOP_ID, LETTER = 2, 3, 9, ord("t")
BOTH_EOS = {EOS: 100.0, FURTHER_EOS: 100.0}
PROMPT = [50, 60, 70]
LIMITS = RequestLimits(max_model_len=64, vocab_size=VOCAB_SIZE, max_logprobs=20)
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


class Rule(NamedTuple):
    """Options, and what the answer must be.

    Attributes:
        num_masked: tokens at the beginning of which none may be an end.
        ends: what all tokens behind those are.
    """

    options: dict[str, Any]
    num_tokens: int
    num_masked: int
    ends: set[int]
    finish_reason: FinishReason
    stop_reason: int | None


RULES: dict[str, Rule] = {
    "the end token": Rule({"logit_bias": {EOS: 100.0}}, 1, 0, {EOS}, STOP, None),
    "a further end token is told": Rule(
        {"logit_bias": {FURTHER_EOS: 100.0}}, 1, 0, {FURTHER_EOS}, STOP, FURTHER_EOS
    ),
    "min_tokens holds back the end token": Rule(
        {"logit_bias": {EOS: 100.0}, "min_tokens": 4}, 5, 4, {EOS}, STOP, None
    ),
    "min_tokens holds back a further one": Rule(
        {"logit_bias": {FURTHER_EOS: 100.0}, "min_tokens": 4},
        *(5, 4, {FURTHER_EOS}, STOP, FURTHER_EOS),
    ),
    "ignore_eos silences both": Rule(
        {"logit_bias": BOTH_EOS, "ignore_eos": True}, 8, 0, {EOS, FURTHER_EOS}, LENGTH, None
    ),
    "ignore_eos beside min_tokens": Rule(
        {"logit_bias": BOTH_EOS, "ignore_eos": True, "min_tokens": 4},
        *(8, 4, {EOS, FURTHER_EOS}, LENGTH, None),
    ),
    "ignore_eos leaves the caller's own stop ids": Rule(
        {"logit_bias": {STOP_ID: 100.0}, "ignore_eos": True, "stop_token_ids": [STOP_ID]},
        *(1, 0, {STOP_ID}, STOP, STOP_ID),
    ),
    "a caller may name what is ignored otherwise": Rule(
        {"logit_bias": {FURTHER_EOS: 100.0}, "ignore_eos": True, "stop_token_ids": [FURTHER_EOS]},
        *(1, 0, {FURTHER_EOS}, STOP, FURTHER_EOS),
    ),
    "min_tokens holds back a stop id": Rule(
        {"logit_bias": {STOP_ID: 100.0}, "min_tokens": 4, "stop_token_ids": [7, STOP_ID]},
        *(5, 4, {STOP_ID}, STOP, STOP_ID),
    ),
    "min_tokens as many as max_tokens": Rule(
        {"logit_bias": BOTH_EOS, "min_tokens": 8}, 8, 8, set(), LENGTH, None
    ),
    "an end token at the last place": Rule(
        {"logit_bias": {EOS: 100.0}, "min_tokens": 7}, 8, 7, {EOS}, STOP, None
    ),
}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder, _ = make_hf_folder("llama", tmp_path_factory.mktemp("llama"))
    return load_decoder(ModelFiles("folder", folder))


def make_tokenizer() -> Tokenizer:
    """A token for each character of ASCII, two of which end an answer."""
    alphabet = [chr(code) for code in range(VOCAB_SIZE)]
    vocabulary = {char: code for code, char in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    backend.decoder = tokenizers.decoders.Fuse()
    special = {"eos_token": chr(EOS)}
    return Tokenizer(
        backend, special_tokens=special, more_eos_token_ids=[FURTHER_EOS], source="ascii"
    )


def send(params: SamplingParams) -> EngineCoreRequest:
    """A request as it arrives: nothing of its options has changed on the way."""
    request = make_request("r", PROMPT)
    request.sampling_params = params
    received = RequestDecoder().decode(RequestEncoder().encode(request))
    assert isinstance(received, EngineCoreRequest)
    for name in SamplingParams.__struct_fields__:
        assert getattr(received.sampling_params, name) == getattr(params, name), name
    return received


def ask(decoder: Decoder, **options: Any) -> tuple[list[int], FinishReason, int | str | None, str]:
    """Tokens, finish reason, stop reason and text, as a caller gets them."""
    tokenizer = make_tokenizer()
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 8, **options})
    params = settle_params(params, len(PROMPT), tokenizer, LIMITS)
    config = EngineConfig(max_model_len=64, max_num_seqs=2, block_size=4, num_blocks=32)
    executor = RunnerExecutor(decoder, config, launches_ahead=False)
    driver = CoreDriver(make_core(config, executor), executor)
    log = driver.listen(0, "r")
    driver.core.add(send(params))
    driver.run_until_idle()
    assert log.finish_reason is not None
    text = RequestText(tokenizer, PROMPT, params)
    pieces, kept = "", 0
    for output in log.outputs:
        delta = text.append(output.new_token_ids, output.finish_reason)
        pieces, kept = pieces + delta.text, kept + delta.num_tokens_kept
        if delta.finished_by_stop_string is not None:
            return log.token_ids[:kept], STOP, delta.finished_by_stop_string, pieces
    return log.token_ids, log.finish_reason, log.outputs[-1].stop_reason, pieces


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_an_answer_ends_by_its_rule(decoder: Decoder, rule: Rule) -> None:
    tokens, finish_reason, stop_reason, _ = ask(decoder, **rule.options)
    assert (finish_reason, stop_reason) == (rule.finish_reason, rule.stop_reason)
    assert len(tokens) == rule.num_tokens
    stops = {EOS, FURTHER_EOS, *rule.options.get("stop_token_ids", ())}
    assert not stops & set(tokens[: rule.num_masked])
    assert set(tokens[rule.num_masked :]) <= rule.ends


def test_a_stop_string_within_min_tokens_does_not_end_the_answer_and_a_later_one_does(
    decoder: Decoder,
) -> None:
    forced: dict[str, Any] = {"logit_bias": {LETTER: 100.0}, "stop": "tt"}
    assert ask(decoder, **forced) == ([LETTER] * 2, STOP, "tt", "")
    assert ask(decoder, **forced, min_tokens=4) == ([LETTER] * 5, STOP, "tt", "ttt")
    assert ask(decoder, **forced, min_tokens=8) == ([LETTER] * 8, LENGTH, None, "t" * 8)


def test_more_tokens_at_least_than_at_most_are_refused() -> None:
    with pytest.raises(RequestError, match=r"min_tokens must be at most max_tokens \(4\), got 5"):
        SamplingParams(min_tokens=5, max_tokens=4)
