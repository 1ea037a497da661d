"""What a client needs of text: prompts into token ids, outputs into text.

Pure. An engine checks little of what it gets, and vLLM's is hurt by some of it: what can be
refused without the model is refused here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeGuard

from trio_engine.errors import RequestError
from trio_engine.sampling_params import SamplingParams
from trio_engine.text.chat import ChatMessage, ChatTemplate
from trio_engine.text.request_text import RequestText
from trio_engine.text.settle import RequestLimits, settle_params

if TYPE_CHECKING:
    from trio_engine.text.tokenizer import Tokenizer

Prompt: TypeAlias = str | Sequence[int] | Sequence[ChatMessage]
"""A text, token ids, or the messages of a chat."""

DEFAULT_MAX_LOGPROBS = 20


class PreparedPrompt(NamedTuple):
    """A prompt and its options as they go to the engine."""

    prompt_token_ids: list[int]
    params: SamplingParams


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
        token_ids = self._token_ids_of(prompt, tools, template_variables)
        limits = self.limits
        if not token_ids:
            raise RequestError(f"prompt must not be empty, got {prompt!r:.100}")
        if len(token_ids) >= limits.max_model_len:
            raise RequestError(
                f"prompt must be shorter than max_model_len ({limits.max_model_len} tokens), "
                f"got {len(token_ids)} tokens"
            )
        settled = settle_params(params, len(token_ids), self.tokenizer, limits)
        return PreparedPrompt(token_ids, settled)

    def follow(self, prepared: PreparedPrompt) -> RequestText:
        """Starts reading the output of a prepared request."""
        return RequestText(self.tokenizer, prepared.prompt_token_ids, prepared.params)

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

    def _token_ids_of(
        self,
        prompt: Prompt,
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


def _is_chat(prompt: Prompt) -> TypeGuard[Sequence[ChatMessage]]:
    return isinstance(prompt, list | tuple) and bool(prompt) and isinstance(prompt[0], Mapping)
