"""All that can never be served, in one place: for the wire edge and for use in process.

Pure. A refused request has cost nothing: no block, no slot, no entry in a table.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from trio_engine.errors import RequestError
from trio_engine.sampling_params import MAX_LOGPROB_TOKEN_IDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio_engine.requests import EngineCoreRequest, LoRARequest
    from trio_engine.sampling_params import SamplingParams

UNSUPPORTED_REQUEST_FIELDS: dict[str, Callable[[EngineCoreRequest], bool]] = {
    "pooling_params": lambda request: request.pooling_params is not None,
    "mm_features": lambda request: bool(request.mm_features),
    "resumable": lambda request: request.resumable,
    "prompt_embeds": lambda request: request.prompt_embeds is not None,
    "prompt_is_token_ids": lambda request: request.prompt_is_token_ids is not None,
}
"""Request fields that this engine does not serve, and whether a request uses them."""

UNSUPPORTED_SAMPLING_FIELDS: dict[str, Callable[[SamplingParams], bool]] = {
    "structured_outputs": lambda params: params.structured_outputs is not None,
    "thinking_token_budget": lambda params: params.thinking_token_budget is not None,
}
"""Sampling fields that this engine does not serve, and whether parameters use them."""


def check_request(
    request: EngineCoreRequest,
    *,
    vocab_size: int,
    max_model_len: int,
    enable_lora: bool = False,
) -> SamplingParams:
    """Refuses what can never be served.

    Args:
        request: as decoded; types are right already.
        vocab_size: ids run from 0 to ``vocab_size - 1``.
        max_model_len: prompt and output tokens of one request, not above what the KV cache holds.
        enable_lora: whether requests may name adapters.

    Returns:
        The request's sampling parameters, which are never None for an admitted one.

    Raises:
        RequestError: names the field and the value.
    """
    for name, is_used in UNSUPPORTED_REQUEST_FIELDS.items():
        if is_used(request):
            raise RequestError(f"{name} is not supported by this engine")
    if not math.isfinite(request.arrival_time):  # it orders the queue
        raise RequestError(f"arrival_time must be finite, got {request.arrival_time}")
    params = request.sampling_params
    if params is None:
        raise RequestError("sampling_params is missing")
    for name, uses in UNSUPPORTED_SAMPLING_FIELDS.items():
        if uses(params):
            raise RequestError(f"{name} is not supported by this engine")
    if request.lora_request is not None:
        if not enable_lora:
            raise RequestError("lora_request: this engine serves no adapters (enable_lora is off)")
        check_adapter(request.lora_request)
    _check_prompt(request.prompt_token_ids, vocab_size, max_model_len)
    _check_stop_token_ids(params, vocab_size)
    _check_logprobs(params, vocab_size)
    _check_named_tokens(params, vocab_size)
    return params


def check_adapter(request: LoRARequest) -> None:
    """Refuses an adapter that cannot be loaded by what its request says alone.

    Raises:
        RequestError: names the field and the value.
    """
    if request.lora_int_id < 1:
        raise RequestError(f"lora_int_id must be 1 or more, got {request.lora_int_id}")
    if not request.lora_path:
        raise RequestError(f"adapter {request.lora_name!r} has no lora_path")
    if request.tensorizer_config_dict is not None or request.is_3d_lora_weight:
        raise RequestError(f"adapter {request.lora_name!r}: only PEFT folders are served")


def _check_prompt(prompt: list[int] | None, vocab_size: int, max_model_len: int) -> None:
    if not prompt:
        raise RequestError("prompt_token_ids is empty")
    if len(prompt) >= max_model_len:
        raise RequestError(
            f"prompt of {len(prompt)} tokens does not leave room for an output token:"
            f" max_model_len is {max_model_len}"
        )
    _check_ids("prompt_token_ids", min(prompt), max(prompt), vocab_size)


def _check_stop_token_ids(params: SamplingParams, vocab_size: int) -> None:
    ids = params.all_stop_token_ids
    if ids:
        _check_ids("stop_token_ids", min(ids), max(ids), vocab_size)
    if params.eos_token_id is not None:
        _check_ids("_eos_token_id", params.eos_token_id, params.eos_token_id, vocab_size)


def _check_logprobs(params: SamplingParams, vocab_size: int) -> None:
    for field in ("logprobs", "prompt_logprobs"):
        value = getattr(params, field)
        if value is not None and value > vocab_size:
            raise RequestError(f"{field} is {value}: the vocabulary has {vocab_size} tokens")
    ids = params.logprob_token_ids
    if not ids:
        return
    _check_ids("logprob_token_ids", min(ids), max(ids), vocab_size)
    if len(ids) > MAX_LOGPROB_TOKEN_IDS:
        raise RequestError(
            f"logprob_token_ids has {len(ids)} ids, at most {MAX_LOGPROB_TOKEN_IDS} are served"
        )
    # A front end reads as many columns as logprobs says.
    if params.logprobs not in (None, len(ids)):
        raise RequestError(f"logprobs is {params.logprobs} beside {len(ids)} logprob_token_ids")


def _check_named_tokens(params: SamplingParams, vocab_size: int) -> None:
    bias, words = params.logit_bias, params.bad_words_token_ids or []
    if bias:
        _check_ids("logit_bias", min(bias), max(bias), vocab_size)
    for word in words:
        if not word:
            raise RequestError("_bad_words_token_ids holds a word without tokens")
        _check_ids("_bad_words_token_ids", min(word), max(word), vocab_size)
    if params.allowed_token_ids is not None:
        _check_allowed(set(params.allowed_token_ids), params, vocab_size)


def _check_allowed(allowed: set[int], params: SamplingParams, vocab_size: int) -> None:
    if not allowed:
        raise RequestError("allowed_token_ids is empty")
    _check_ids("allowed_token_ids", min(allowed), max(allowed), vocab_size)
    for word in params.bad_words_token_ids or []:
        if len(word) == 1:
            allowed.discard(word[0])
    if params.min_tokens:
        allowed -= params.all_stop_token_ids
        allowed.discard(-1 if params.eos_token_id is None else params.eos_token_id)
    if not allowed:
        raise RequestError("bad_words and min_tokens leave nothing of allowed_token_ids")


def _check_ids(field: str, low: int, high: int, vocab_size: int) -> None:
    if low < 0 or high >= vocab_size:
        worst = low if low < 0 else high
        raise RequestError(f"{field} holds {worst}: ids run from 0 to {vocab_size - 1}")
