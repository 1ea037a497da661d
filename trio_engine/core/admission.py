"""All that can never be served, in one place: for the wire edge and for use in process.

Pure. A refused request has cost nothing: no block, no slot, no entry in a table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trio_engine.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio_engine.requests import EngineCoreRequest
    from trio_engine.sampling_params import SamplingParams

UNSUPPORTED_REQUEST_FIELDS: dict[str, Callable[[EngineCoreRequest], bool]] = {
    "pooling_params": lambda request: request.pooling_params is not None,
    "mm_features": lambda request: bool(request.mm_features),
    "resumable": lambda request: request.resumable,
    "lora_request": lambda request: request.lora_request is not None,
    "prompt_embeds": lambda request: request.prompt_embeds is not None,
    "prompt_is_token_ids": lambda request: request.prompt_is_token_ids is not None,
}
"""Request fields that this engine does not serve, and whether a request uses them."""

UNSUPPORTED_SAMPLING_FIELDS: dict[str, Callable[[SamplingParams], bool]] = {
    "presence_penalty": lambda params: params.presence_penalty != 0.0,
    "frequency_penalty": lambda params: params.frequency_penalty != 0.0,
    "repetition_penalty": lambda params: params.repetition_penalty != 1.0,
    "logprobs": lambda params: params.logprobs is not None,
    "prompt_logprobs": lambda params: params.prompt_logprobs is not None,
    "logprob_token_ids": lambda params: params.logprob_token_ids is not None,
    "structured_outputs": lambda params: params.structured_outputs is not None,
    "logit_bias": lambda params: bool(params.logit_bias),
    "allowed_token_ids": lambda params: params.allowed_token_ids is not None,
    "bad_words": lambda params: bool(params.bad_words_token_ids),
    "thinking_token_budget": lambda params: params.thinking_token_budget is not None,
}
"""Sampling fields that this engine does not serve, and whether parameters use them."""


def check_request(
    request: EngineCoreRequest, *, vocab_size: int, max_model_len: int
) -> SamplingParams:
    """Refuses what can never be served.

    Args:
        request: as decoded; types are right already.
        vocab_size: ids run from 0 to ``vocab_size - 1``.
        max_model_len: prompt and output tokens of one request, not above what the KV cache holds.

    Returns:
        The request's sampling parameters, which are never None for an admitted one.

    Raises:
        RequestError: names the field and the value.
    """
    for name, is_used in UNSUPPORTED_REQUEST_FIELDS.items():
        if is_used(request):
            raise RequestError(f"{name} is not supported by this engine")
    params = request.sampling_params
    if params is None:
        raise RequestError("sampling_params is missing")
    for name, uses in UNSUPPORTED_SAMPLING_FIELDS.items():
        if uses(params):
            raise RequestError(f"{name} is not supported by this engine")
    _check_prompt(request.prompt_token_ids, vocab_size, max_model_len)
    _check_stop_token_ids(params, vocab_size)
    return params


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


def _check_ids(field: str, low: int, high: int, vocab_size: int) -> None:
    if low < 0 or high >= vocab_size:
        worst = low if low < 0 else high
        raise RequestError(f"{field} holds {worst}: ids run from 0 to {vocab_size - 1}")
