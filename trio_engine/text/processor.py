"""What a client needs of text: prompts into token ids, outputs into text.

Pure. An engine checks little of what it gets, and vLLM's is hurt by some of it: what can be
refused without the model is refused here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeGuard

from trio_engine.errors import RequestError
from trio_engine.sampling_params import SamplingParams
from trio_engine.tensors import TensorData
from trio_engine.text.chat import ChatMessage, ChatTemplate
from trio_engine.text.embeds_prompt import EmbedsPrompt
from trio_engine.text.request_text import RequestText
from trio_engine.text.settle import RequestLimits, settle_params

if TYPE_CHECKING:
    from trio_engine.text.tokenizer import Tokenizer

Prompt: TypeAlias = str | Sequence[int] | Sequence[ChatMessage] | EmbedsPrompt
"""A text, token ids, the messages of a chat, or embeddings."""

DEFAULT_MAX_LOGPROBS = 20


class PreparedPrompt(NamedTuple):
    """A prompt and its options as they go to the engine.

    Attributes:
        prompt_token_ids: None if all of it is embeddings.
        params: settled.
        prompt_embeds: None for a prompt of tokens.
        prompt_is_token_ids: where there are both, which counts.
    """

    prompt_token_ids: list[int] | None
    params: SamplingParams
    prompt_embeds: TensorData | None = None
    prompt_is_token_ids: list[bool] | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Positions of the prompt."""
        if self.prompt_embeds is not None:
            return self.prompt_embeds.shape[0]
        return len(self.prompt_token_ids or ())


class TextProcessor:
    """Prepares requests for one engine and reads their outputs. Holds no state of a request.

    Args:
        tokenizer: of the engine's model. Without one, prompts are token ids and outputs have no
            text.
        max_model_len: of the engine: prompt and output tokens together.
        vocab_size: the model's rows, where they are known; there may be more than tokens.
        max_logprobs: most that a request may ask for; -1 for no limit.

    Example:
        >>> processor = TextProcessor(None, max_model_len=64)
        >>> processor.prepare([1, 2, 3], SamplingParams(max_tokens=None)).params.max_tokens
        61
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        max_model_len: int,
        vocab_size: int | None = None,
        max_logprobs: int = DEFAULT_MAX_LOGPROBS,
    ) -> None:
        self.tokenizer = tokenizer
        sizes = [vocab_size, tokenizer.vocab_size if tokenizer is not None else None]
        known_size = max((size for size in sizes if size is not None), default=None)
        self.limits = RequestLimits(max_model_len, known_size, max_logprobs)
        self._chat_template: ChatTemplate | None = None

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_variables: Mapping[str, Any] | None = None,
    ) -> PreparedPrompt:
        """Makes a prompt and its options ready for the engine; changes neither.

        Args:
            prompt: what to continue. A text gets the special tokens that the model wants before
                it; messages are written by the model's chat template.
            params: as the caller wants them.
            tools: for messages only: functions that the model may call.
            template_variables: for messages only: what else the template reads, and
                ``add_generation_prompt``.

        Raises:
            RequestError: it can never be served; names the field and its value.
            ModelError: the model's chat template does not compile or is unsafe.
        """
        if isinstance(prompt, EmbedsPrompt):
            prepared = self._prepare_embeds(prompt, params)
        else:
            token_ids = self._token_ids_of(prompt, tools, template_variables)
            prepared = PreparedPrompt(token_ids, params)
        num_tokens, limits = prepared.num_prompt_tokens, self.limits
        if not num_tokens:
            raise RequestError(f"prompt must not be empty, got {prompt!r:.100}")
        if num_tokens >= limits.max_model_len:
            raise RequestError(
                f"prompt must be shorter than max_model_len ({limits.max_model_len} tokens), "
                f"got {num_tokens} tokens"
            )
        settled = settle_params(params, num_tokens, self.tokenizer, limits)
        return prepared._replace(params=settled)

    def follow(self, prepared: PreparedPrompt) -> RequestText:
        """Starts reading the output of a prepared request."""
        # What embeddings mean has no bytes, and ids among them are no text that goes on.
        context = [] if prepared.prompt_embeds is not None else prepared.prompt_token_ids or []
        return RequestText(self.tokenizer, context, prepared.params)

    def render_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Writes messages by the model's chat template; arguments as for ``prepare``.

        Raises:
            RequestError: the model has no template, or the messages do not fit it.
            ModelError: the template does not compile or is unsafe.
        """
        tokenizer = self._need_tokenizer(messages)
        if self._chat_template is None:
            if tokenizer.chat_template is None:
                raise RequestError("prompt is a chat, but the model has no chat template")
            self._chat_template = ChatTemplate(tokenizer.chat_template)
        variables = {**tokenizer.special_tokens, **(template_variables or {}), "tools": tools}
        return self._chat_template.render(messages, **variables)

    def _prepare_embeds(self, prompt: EmbedsPrompt, params: SamplingParams) -> PreparedPrompt:
        if params.prompt_logprobs is not None:
            raise RequestError(
                f"prompt_logprobs must be None for embeddings, got {params.prompt_logprobs}"
            )
        embeds = prompt.to_tensor()
        prompt.check(embeds.shape[0], self.limits)
        return PreparedPrompt(prompt.token_ids, params, embeds, prompt.is_token_ids)

    def _token_ids_of(
        self,
        prompt: str | Sequence[int] | Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] | None,
        template_variables: Mapping[str, Any] | None,
    ) -> list[int]:
        if isinstance(prompt, str):
            return self._need_tokenizer(prompt).encode(prompt)
        if _is_chat(prompt):
            text = self.render_chat(prompt, tools=tools, template_variables=template_variables)
            # The template writes BOS and its kin itself.
            return self._need_tokenizer(prompt).encode(text, add_special_tokens=False)
        if not isinstance(prompt, list | tuple):
            raise RequestError(
                f"prompt must be a str, token ids or messages, got {type(prompt).__name__}"
            )
        self.limits.check_token_ids("prompt", prompt)
        return list(prompt)

    def _need_tokenizer(self, prompt: Prompt) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(
                f"prompt must be token ids because there is no tokenizer, got {prompt!r:.100}"
            )
        return self.tokenizer


def _is_chat(
    prompt: Sequence[int] | Sequence[ChatMessage],
) -> TypeGuard[Sequence[ChatMessage]]:
    return isinstance(prompt, list | tuple) and bool(prompt) and isinstance(prompt[0], Mapping)
