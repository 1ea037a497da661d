"""All that can never be served, in one place: for the wire edge and for use in process.

Pure. A refused request has cost nothing: no block, no slot, no entry in a table.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeVar

import msgspec

from trio_engine.core.prompt import check_ids, check_prompt
from trio_engine.errors import OverloadedError, RequestError
from trio_engine.sampling_params import MAX_LOGPROB_TOKEN_IDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio_engine.core.outbox import Outbox
    from trio_engine.core.scheduler import Scheduler
    from trio_engine.requests import EngineCoreRequest, LoRARequest
    from trio_engine.sampling_params import SamplingParams

T = TypeVar("T")

UNSUPPORTED_REQUEST_FIELDS: dict[str, Callable[[EngineCoreRequest], bool]] = {
    "pooling_params": lambda request: request.pooling_params is not None,
    "mm_features": lambda request: bool(request.mm_features),
    "resumable": lambda request: request.resumable,
}
"""Request fields that this engine does not serve, and whether a request uses them."""

UNSUPPORTED_SAMPLING_FIELDS: dict[str, Callable[[SamplingParams], bool]] = {
    "thinking_token_budget": lambda params: params.thinking_token_budget is not None,
}
"""Sampling fields that this engine does not serve, and whether parameters use them."""


class Admission(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine can serve.

    Attributes:
        vocab_size: ids run from 0 to ``vocab_size - 1``.
        max_model_len: prompt and output tokens of one request, not above what the KV cache holds.
        hidden_size: of a prompt embedding; None if the executor takes none.
        enable_lora: whether requests may name adapters.
        max_waiting_requests: how many may wait for a slot; None for no bound.
    """

    vocab_size: int
    max_model_len: int
    hidden_size: int | None = None
    enable_lora: bool = False
    max_waiting_requests: int | None = None

    def check_request(self, request: EngineCoreRequest) -> SamplingParams:
        """Refuses what can never be served.

        Args:
            request: as decoded; types are right already.

        Returns:
            The request's sampling parameters, which are never None for an admitted one.

        Raises:
            RequestError: names the field and the value.
        """
        _check_used(request, UNSUPPORTED_REQUEST_FIELDS)
        if not math.isfinite(request.arrival_time):  # it orders the queue
            raise RequestError(f"arrival_time must be finite, got {request.arrival_time}")
        params = request.sampling_params
        if params is None:
            raise RequestError("sampling_params is missing")
        _check_used(params, UNSUPPORTED_SAMPLING_FIELDS)
        if request.lora_request is not None:
            self._check_adapter(request.lora_request)
        check_prompt(
            request,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            hidden_size=self.hidden_size,
        )
        _check_fields_agree(request, params)
        _check_stop_token_ids(params, self.vocab_size)
        _check_logprobs(params, self.vocab_size)
        _check_named_tokens(params, self.vocab_size)
        return params

    def check_load(self, scheduler: Scheduler, outbox: Outbox) -> None:
        """Refuses what could be served, but not now.

        Raises:
            OverloadedError: too many wait, or the request's client does not read its outputs.
        """
        if self.max_waiting_requests is not None:
            num_waiting = scheduler.num_excess_requests
            if num_waiting >= self.max_waiting_requests:
                raise OverloadedError(f"{num_waiting} requests wait for a slot already")
        if outbox.is_full:
            raise OverloadedError(f"client {outbox.client_index} does not read its outputs")

    def _check_adapter(self, request: LoRARequest) -> None:
        if not self.enable_lora:
            raise RequestError("lora_request: this engine serves no adapters (enable_lora is off)")
        check_adapter(request)


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


def _check_used(value: T, unsupported: dict[str, Callable[[T], bool]]) -> None:
    for name, is_used in unsupported.items():
        if is_used(value):
            raise RequestError(f"{name} is not supported by this engine")


def _check_fields_agree(request: EngineCoreRequest, params: SamplingParams) -> None:
    if request.prompt_embeds is not None and params.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs cannot be told of prompt_embeds")
    # Where reasoning in the output ends, only a parser of the model's format could tell.
    if params.structured_outputs is not None and request.reasoning_ended is False:
        raise RequestError("structured_outputs after reasoning is not supported by this engine")


def _check_stop_token_ids(params: SamplingParams, vocab_size: int) -> None:
    ids = params.all_stop_token_ids
    if ids:
        check_ids("stop_token_ids", min(ids), max(ids), vocab_size)
    if params.eos_token_id is not None:
        check_ids("_eos_token_id", params.eos_token_id, params.eos_token_id, vocab_size)


def _check_logprobs(params: SamplingParams, vocab_size: int) -> None:
    for field in ("logprobs", "prompt_logprobs"):
        value = getattr(params, field)
        if value is not None and value > vocab_size:
            raise RequestError(f"{field} is {value}: the vocabulary has {vocab_size} tokens")
    ids = params.logprob_token_ids
    if not ids:
        return
    check_ids("logprob_token_ids", min(ids), max(ids), vocab_size)
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
        check_ids("logit_bias", min(bias), max(bias), vocab_size)
    for word in words:
        if not word:
            raise RequestError("_bad_words_token_ids holds a word without tokens")
        check_ids("_bad_words_token_ids", min(word), max(word), vocab_size)
    if params.allowed_token_ids is not None:
        _check_allowed(set(params.allowed_token_ids), params, vocab_size)


def _check_allowed(allowed: set[int], params: SamplingParams, vocab_size: int) -> None:
    if not allowed:
        raise RequestError("allowed_token_ids is empty")
    check_ids("allowed_token_ids", min(allowed), max(allowed), vocab_size)
    for word in params.bad_words_token_ids or []:
        if len(word) == 1:
            allowed.discard(word[0])
    if params.min_tokens:
        allowed -= params.all_stop_token_ids
        allowed.discard(-1 if params.eos_token_id is None else params.eos_token_id)
    if not allowed:
        raise RequestError("bad_words and min_tokens leave nothing of allowed_token_ids")
