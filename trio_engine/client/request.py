"""One request on the client's side: what was asked, and what its outputs become.

Pure but for the mailbox's wake-up. Sending and aborting belong to the client.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

import msgspec

from trio_engine.client.mailbox import Mailbox
from trio_engine.errors import RequestError, RequestFailedError
from trio_engine.outputs import EngineCoreOutput, FinishReason
from trio_engine.requests import EngineCoreRequest, LoRARequest
from trio_engine.sampling_params import ALL_LOGPROBS, SamplingParams
from trio_engine.text.processor import Prompt

if TYPE_CHECKING:
    from typing import Self

    from trio_engine.text.processor import PreparedPrompt, TextProcessor
    from trio_engine.text.request_text import RequestText


class RequestOptions(TypedDict, total=False):
    """Keywords of ``generate`` and ``complete``.

    ``request_id``: the caller's name for it, made up if not given; two requests may share one.
    ``priority``: lower runs first, under an engine's policy "priority". ``lora_request``: adapter
    to use. ``cache_salt``: shares the prefix cache only with requests of the same salt.
    ``trace_headers``: handed back with its outputs. ``tools``, ``template_variables``: for a
    prompt of chat messages, see ``TextProcessor.prepare``.
    """

    request_id: str | None
    priority: int
    lora_request: LoRARequest | None
    cache_salt: str | None
    trace_headers: dict[str, str] | None
    tools: Sequence[Mapping[str, Any]] | None
    template_variables: Mapping[str, Any] | None


MAX_ANSWERS = 16_384
"""Of one call: each costs a request of its own, and a slip of the hand must not cost a million.
vLLM's limit is the same (``VLLM_MAX_N_SEQUENCES``)."""


class RequestSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a caller asked for, before tokenizing."""

    request_id: str
    prompt: Prompt
    params: SamplingParams
    options: RequestOptions

    @classmethod
    def of(cls, prompt: Prompt, params: SamplingParams | None, options: RequestOptions) -> Self:
        """Gives it a name if it has none; refuses what no engine could be asked.

        Raises:
            RequestError: too many answers, or an option of the wrong type. On the wire that would
                be an ADD that does not decode, which ends a vLLM engine's hearing.
            TypeError: no such option.
        """
        params = params or SamplingParams()
        _check_options(options)
        if params.n > MAX_ANSWERS:
            raise RequestError(f"n must be at most {MAX_ANSWERS}, got {params.n}")
        request_id = options.get("request_id") or f"request-{uuid.uuid4().hex}"
        return cls(request_id=request_id, prompt=prompt, params=params, options=options)

    def prepare(self, text: TextProcessor) -> PreparedPrompt:
        """Tokenizes and settles it for one engine. Safe on any thread.

        Raises:
            RequestError: it can never be served.
            ModelError: the model's chat template is at fault.
        """
        return text.prepare(
            self.prompt,
            self.params,
            tools=self.options.get("tools"),
            template_variables=self.options.get("template_variables"),
        )


class ClientRequest:
    """A request to the engine, for one answer, that was sent and has not been forgotten.

    Args:
        spec: what the caller asked for.
        prepared: what is sent of it.
        text: follows its output.
        engine_index: the engine that it goes to.
        internal_id: what the engine knows it by.
        index: which of the caller's answers it makes.

    Attributes:
        request_id: the caller's name for it.
        internal_id, engine_index: as given.
        mailbox: what has arrived for its reader.
    """

    def __init__(
        self,
        spec: RequestSpec,
        prepared: PreparedPrompt,
        text: RequestText,
        engine_index: int,
        *,
        internal_id: str,
        index: int = 0,
    ) -> None:
        self.request_id = spec.request_id
        self.internal_id = internal_id
        self.engine_index = engine_index
        params = prepared.params
        self.mailbox = Mailbox(
            spec.request_id,
            prepared.num_prompt_tokens,
            params.output_kind,
            _num_logprobs(params),
            index=index,
        )
        self._spec = spec
        self._prepared = prepared
        self._text = text

    def to_message(self, client_index: int) -> EngineCoreRequest:
        """The ADD that asks an engine for it."""
        options = self._spec.options
        return EngineCoreRequest(
            request_id=self.internal_id,
            prompt_token_ids=self._prepared.prompt_token_ids,
            prompt_embeds=self._prepared.prompt_embeds,
            prompt_is_token_ids=self._prepared.prompt_is_token_ids,
            mm_features=None,
            sampling_params=self._prepared.params,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=options.get("lora_request"),
            cache_salt=options.get("cache_salt"),
            data_parallel_rank=None,
            client_index=client_index,
            priority=options.get("priority", 0),
            trace_headers=options.get("trace_headers"),
            external_req_id=self.request_id,
        )

    def apply(self, entry: EngineCoreOutput) -> bool:
        """Takes one entry of an engine's outputs.

        Returns:
            Whether a stop string ended the request, of which the engine does not know.
        """
        delta = self._text.append(entry.new_token_ids, entry.finish_reason)
        self.mailbox.put(entry, delta.text, delta.num_tokens_kept)
        if delta.finished_by_stop_string is not None:
            self.mailbox.finish(FinishReason.STOP, delta.finished_by_stop_string)
            return entry.finish_reason is None
        if entry.finish_reason is FinishReason.ERROR:
            self.mailbox.fail(self._failure(entry.stop_reason))
        elif entry.finish_reason is not None:
            self.mailbox.finish(entry.finish_reason, entry.stop_reason)
        return False

    def abort(self) -> None:
        """Ends it without the engine: the terminal output that an ABORT does not bring.

        Text that was held back as the start of a stop string goes out with it.
        """
        self.apply(EngineCoreOutput(self.internal_id, [], finish_reason=FinishReason.ABORT))

    def _failure(self, reason: int | str | None) -> RequestFailedError:
        said = "its log says why" if reason is None else f"reason: {reason}"
        return RequestFailedError(
            f"the engine ended request {self.request_id!r} with ERROR; {said}",
            request_id=self.request_id,
            reason=reason,
        )


_OPTION_TYPES: dict[str, tuple[type, ...]] = {
    "request_id": (str,),
    "priority": (int,),
    "lora_request": (LoRARequest,),
    "cache_salt": (str,),
    "trace_headers": (dict,),
    "tools": (Sequence,),
    "template_variables": (Mapping,),
}


def _check_options(options: RequestOptions) -> None:
    for name, value in options.items():
        types = _OPTION_TYPES.get(name)
        if types is None:
            raise TypeError(f"no option {name!r}; there are {', '.join(_OPTION_TYPES)}")
        if value is not None and not isinstance(value, types):
            raise RequestError(f"{name} must be of type {types[0].__name__}, got {value!r}")


def _num_logprobs(params: SamplingParams) -> int | None:
    """Entries of a logprobs row beside the sampled token; None leaves them as they come."""
    return None if params.num_logprobs == ALL_LOGPROBS else params.num_logprobs
