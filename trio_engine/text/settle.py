"""Settles the sampling options of one request, as an engine expects them.

Pure. An engine knows neither the tokenizer nor the model's configuration for generation, and it
takes the options as they come: what depends on these is filled in, and refused, here.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from trio_engine.errors import RequestError
from trio_engine.sampling_params import MAX_LOGPROB_TOKEN_IDS, StructuredOutputsParams

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trio_engine.sampling_params import SamplingParams
    from trio_engine.text.tokenizer import Tokenizer


class RequestLimits(NamedTuple):
    """What requests are held to.

    Attributes:
        max_model_len: prompt and output tokens together.
        vocab_size: token ids end below it; None if it is not known.
        max_logprobs: of ``logprobs`` and ``prompt_logprobs``; -1 for no limit.
    """

    max_model_len: int
    vocab_size: int | None
    max_logprobs: int

    def check_token_ids(self, field: str, token_ids: Iterable[int]) -> None:
        """Refuses what is no token id: such an id would reach the tensors.

        Raises:
            RequestError: names the field, the id and its place.
        """
        end = math.inf if self.vocab_size is None else self.vocab_size
        for place, token_id in enumerate(token_ids):
            # Not isinstance: a bool is an int, but on the wire it is none.
            if type(token_id) is not int or not 0 <= token_id < end:
                allowed = "0 or more" if self.vocab_size is None else f"0 to {end - 1}"
                raise RequestError(
                    f"{field} must be token ids, {allowed}, got {token_id!r} at place {place}"
                )


def settle_params(
    params: SamplingParams,
    num_prompt_tokens: int,
    tokenizer: Tokenizer | None,
    limits: RequestLimits,
) -> SamplingParams:
    """Makes the options that go to the engine, without changing the caller's.

    Args:
        params: the caller's.
        num_prompt_tokens: fewer than ``limits.max_model_len``.
        tokenizer: None leaves EOS to what ``params`` says and allows no text options.
        limits: of the engine.

    Raises:
        RequestError: an option cannot be served; names it and its value.

    Counterpart: ``InputProcessor`` in ``vllm/v1/engine/input_processor.py``, and
    ``update_from_generation_config`` and ``update_from_tokenizer`` of its SamplingParams.
    """
    _check_text_options(params, tokenizer)
    _check_logprobs(params, limits.max_logprobs)
    _check_num_logprob_token_ids(params)
    if params.structured_outputs is not None:
        _check_structured_outputs(params.structured_outputs)
    for field in ("allowed_token_ids", "logprob_token_ids", "logit_bias"):
        limits.check_token_ids(field, getattr(params, field) or ())
    if params.allowed_token_ids == []:
        raise RequestError("allowed_token_ids must not be empty, got []")
    changes: dict[str, Any] = _stop_changes(params, tokenizer)
    if params.max_tokens is None:
        changes["max_tokens"] = limits.max_model_len - num_prompt_tokens
    if params.bad_words and tokenizer is not None:
        changes["bad_words_token_ids"] = _bad_words_token_ids(params.bad_words, tokenizer)
    return msgspec.structs.replace(params, **changes)


def _check_text_options(params: SamplingParams, tokenizer: Tokenizer | None) -> None:
    if params.stop_strings and not (params.detokenize and tokenizer):
        reason = "there is no tokenizer" if params.detokenize else "detokenize is False"
        raise RequestError(f"stop must be empty because {reason}, got {params.stop!r}")
    if params.bad_words and tokenizer is None:
        raise RequestError(
            f"bad_words must be empty because there is no tokenizer, got {params.bad_words!r}"
        )


def _check_structured_outputs(structured: StructuredOutputsParams) -> None:
    """What can be seen without the library: that it can be sent, and is JSON where it must be."""
    try:
        msgspec.convert(msgspec.to_builtins(structured), StructuredOutputsParams)
    except (TypeError, msgspec.ValidationError, RecursionError) as error:
        raise RequestError(f"structured_outputs cannot be sent: {error}") from None
    for field in ("json", "structural_tag"):
        value = getattr(structured, field)
        if isinstance(value, str):
            _check_json_object(f"structured_outputs.{field}", value)


def _check_json_object(field: str, text: str) -> None:
    try:
        value = msgspec.json.decode(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{field} must be JSON, got {text!r:.100}: {error}") from None
    if not isinstance(value, dict):
        raise RequestError(f"{field} must be a JSON object, got {text!r:.100}")


def _check_logprobs(params: SamplingParams, max_logprobs: int) -> None:
    if max_logprobs == -1:
        return
    for field in ("logprobs", "prompt_logprobs"):
        value = getattr(params, field)
        if value is not None and not 0 <= value <= max_logprobs:  # -1 is the whole vocabulary
            raise RequestError(f"{field} must be at most {max_logprobs}, got {value}")


def _check_num_logprob_token_ids(params: SamplingParams) -> None:
    num_ids, limit = len(params.logprob_token_ids or ()), MAX_LOGPROB_TOKEN_IDS
    if num_ids > limit:
        raise RequestError(f"logprob_token_ids must be at most {limit} ids, got {num_ids}")
    if num_ids and params.logprobs not in (None, num_ids):
        raise RequestError(
            f"logprobs must be None or {num_ids}, the number of logprob_token_ids,"
            f" got {params.logprobs}"
        )


def _stop_changes(params: SamplingParams, tokenizer: Tokenizer | None) -> dict[str, Any]:
    eos_ids = () if tokenizer is None else tokenizer.eos_token_ids
    given = params.stop_token_ids or []
    # min_tokens masks all of them, whether or not they end the output.
    changes: dict[str, Any] = {"all_stop_token_ids": {*params.all_stop_token_ids, *given, *eos_ids}}
    if params.ignore_eos:
        return changes | {"eos_token_id": None}
    primary = params.eos_token_id if tokenizer is None else tokenizer.eos_token_id
    further = [token_id for token_id in eos_ids if token_id != primary and token_id not in given]
    if further:
        changes["stop_token_ids"] = [*given, *further]
    return changes | {"eos_token_id": primary}


def _bad_words_token_ids(bad_words: Iterable[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Tokens of each word as it opens a text and, if that differs, as it follows a space."""
    found = []
    for word in bad_words:
        at_start = tokenizer.encode(word.lstrip(), add_special_tokens=False)
        if not at_start:
            raise RequestError(f"bad_words must be words, got {word!r}")
        found.append(at_start)
        inside = tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
        # A space that stays a token of its own would forbid all spaces, hence the lengths.
        if inside[0] != at_start[0] and len(inside) == len(at_start):
            found.append(inside)
    return found
