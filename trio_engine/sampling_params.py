"""How one request is sampled and when it stops: what a caller builds is what crosses the wire.

Pure. Defaults, limits and normalization are vLLM 0.25.1's (``vllm/sampling_params.py``).
"""

from __future__ import annotations

import enum
import math
from typing import Any

import msgspec

from trio_engine.errors import RequestError

MIN_TEMPERATURE = 0.01
"""A smaller temperature above 0 becomes this one: below it float32 softmax overflows."""

MAX_TEMPERATURE = 2.0
MAX_LOGPROB_TOKEN_IDS = 128
ALL_LOGPROBS = -1
"""As a number of log probabilities: one for each token of the vocabulary."""

SEED_LIMITS = (-(2**63), 2**63 - 1)


class RequestOutputKind(enum.IntEnum):
    """What a client hands to its caller of a request's outputs. The engine does not look at it."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class StructuredOutputsParams(msgspec.Struct, kw_only=True):
    """A grammar that the output must follow: exactly one of the first six fields is set.

    Attributes:
        json: a JSON schema, as text or as what JSON makes of it.
        regex: which the whole output matches. ``\\d``, ``\\w`` and ``\\s`` are ASCII; there are no
            lookarounds and no backward references.
        choice: the output is one of these.
        grammar: in llama.cpp's EBNF (``root ::= "yes" | "no"``) or in Lark's language.
        json_object: True for any JSON object.
        structural_tag: free text with JSON between tags, as JSON text: ``{"structures": [{"begin",
            "schema", "end"}], "triggers": [...]}``.
        disable_any_whitespace: of JSON, keep to its compact form.
        disable_additional_properties: objects have the properties that their schema names and no
            others, unless it says more about that.
        whitespace_pattern: a regular expression for what may stand between the parts of JSON.
        backend: and ``backend_was_auto``: vLLM's names of libraries. All mean the engine's own.

    Raises:
        RequestError: none of the six is set, or several, or one is empty; and as
            ``SamplingParams`` does.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    backend: str | None = msgspec.field(default=None, name="_backend")
    backend_was_auto: bool = msgspec.field(default=False, name="_backend_was_auto")

    def __post_init__(self) -> None:
        kinds = self._kinds()
        if len(kinds) != 1:
            given = " and ".join(kinds) or "none"
            raise RequestError(f"structured_outputs must be one of {_KINDS}, got {given}")
        for name in ("json", "regex", "choice", "grammar", "structural_tag"):
            value = getattr(self, name)
            # An empty schema is one: it allows everything.
            _require(value not in ("", []), f"structured_outputs.{name}", value, "not empty")
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise RequestError(
                "structured_outputs.whitespace_pattern must be None beside disable_any_whitespace,"
                f" got {self.whitespace_pattern!r}"
            )

    @property
    def kind(self) -> str:
        """The name of the one field that is set."""
        (kind,) = self._kinds()
        return kind

    def _kinds(self) -> list[str]:
        return [name for name in _KINDS if getattr(self, name) not in (None, False)]


_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class RepetitionDetectionParams(msgspec.Struct, kw_only=True):
    """Ends a request whose last tokens repeat one pattern ``min_count`` times."""

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Sampling options of one request; also the wire map of the same name.

    Values are checked and normalized when the object is made, by a caller or by decoding:
    ``temperature`` 0 means greedy and resets ``top_p``, ``top_k`` and ``min_p``; one in
    (0, 0.01) becomes 0.01; seed -1 means none; ``all_stop_token_ids`` gains
    ``stop_token_ids``; ``skip_reading_prefix_cache`` None becomes "prompt_logprobs was asked".
    What an engine does not serve is refused when the request gets there, not here.

    Attributes:
        n: answers to one prompt; the client makes each a request of its own, with n = 1.
        presence_penalty: -2 to 2, off the logit of every token in the output.
        frequency_penalty: -2 to 2, the same times the token's count there.
        repetition_penalty: above 1 disfavours tokens of prompt and output.
        temperature: 0-2; 0 takes the most likely token.
        top_p: draw among the likeliest tokens of this joint probability, (0, 1].
        top_k: draw among so many; 0 or -1 means all.
        min_p: draw among tokens of at least this share of the best one's probability.
        seed: makes draws repeatable, whatever runs beside; None does not.
        stop: strings that end the answer; the client looks for them in the text.
        stop_token_ids: tokens that end the answer.
        ignore_eos: the model's own end tokens do not end it.
        max_tokens: of the answer; None leaves it to max_model_len.
        min_tokens: before these nothing but a length limit ends the answer.
        logit_bias: by token id, added to its logit.
        allowed_token_ids: no other token is drawn; None for all.
        bad_words: words that are not finished; the client makes token ids of them.
        repetition_detection: when to end an answer that repeats itself.
        logprobs: tell so many of the likeliest tokens at each place of the answer; -1 all.
        prompt_logprobs: the same for the prompt.
        logprob_token_ids: tell these tokens, in this order, in place of the likeliest.
        output_kind: what an item of a client's stream holds; a plain 0, 1 or 2 means the same.
        eos_token_id: and ``all_stop_token_ids`` (those masked before ``min_tokens``): the client
            fills them in from the tokenizer.

    Raises:
        RequestError: a value out of range, by field and value. While decoding, msgspec turns
            it into its own ValidationError, which ``wire.codec`` translates.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: list[str] | str | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    skip_clone: bool = False
    output_text_buffer_length: int = 0
    eos_token_id: int | None = msgspec.field(default=None, name="_eos_token_id")
    all_stop_token_ids: set[int] = msgspec.field(default_factory=set, name="_all_stop_token_ids")
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    extra_args: dict[str, Any] | None = None
    routed_experts_prompt_start: int = 0
    bad_words: list[str] | None = None
    bad_words_token_ids: list[list[int]] | None = msgspec.field(
        default=None, name="_bad_words_token_ids"
    )
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None
    repetition_detection: RepetitionDetectionParams | None = None

    def __post_init__(self) -> None:
        self._check_sampling()
        self._check_lengths()
        self._normalize()

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken, without a draw."""
        return self.temperature == 0.0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as a tuple, whichever form it was given in."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def num_logprobs(self) -> int | None:
        """What to tell beside each sampled token, ``ALL_LOGPROBS`` for all; None if not asked."""
        if self.logprobs is not None:
            return self.logprobs
        return len(self.logprob_token_ids) if self.logprob_token_ids else None

    def _check_sampling(self) -> None:
        # Each test is written so that NaN fails it.
        _require(0.0 <= self.temperature <= MAX_TEMPERATURE, "temperature", self.temperature, "0-2")
        _require(0.0 < self.top_p <= 1.0, "top_p", self.top_p, "(0, 1]")
        _require(self.top_k >= -1, "top_k", self.top_k, "-1 or more")
        _require(0.0 <= self.min_p <= 1.0, "min_p", self.min_p, "0-1")
        _require(
            0.0 < self.repetition_penalty < math.inf,
            "repetition_penalty",
            self.repetition_penalty,
            "above 0",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(-2.0 <= value <= 2.0, name, value, "-2 to 2")
        if self.logit_bias:
            for token_id, bias in self.logit_bias.items():
                _require(bias < math.inf, f"logit_bias of {token_id}", bias, "below infinity")
        if self.seed is not None:
            low, high = SEED_LIMITS
            # Not isinstance: a bool is an int, but on the wire it is none.
            is_seed = type(self.seed) is int and low <= self.seed <= high
            _require(is_seed, "seed", self.seed, "a signed 64-bit integer")

    def _check_lengths(self) -> None:
        _require(self.n >= 1, "n", self.n, "1 or more")
        _require(self.n == 1 or not self.is_greedy, "n", self.n, "1 at temperature 0")
        _require(self.min_tokens >= 0, "min_tokens", self.min_tokens, "0 or more")
        if self.max_tokens is not None:
            _require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "1 or more")
            if self.min_tokens > self.max_tokens:
                limit = f"at most max_tokens ({self.max_tokens})"
                _require(False, "min_tokens", self.min_tokens, limit)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _require(value is None or value >= -1, name, value, "-1 or more")
        for name, strings in (("stop", self.stop_strings), ("bad_words", self.bad_words)):
            if strings:
                _require(all(strings), name, strings, "strings that are not empty")

    def _normalize(self) -> None:
        self.output_kind = _output_kind(self.output_kind)
        if self.temperature == 0.0:
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0
        elif self.temperature < MIN_TEMPERATURE:
            self.temperature = MIN_TEMPERATURE
        if self.top_k == -1:
            self.top_k = 0
        if self.seed == -1:
            self.seed = None
        if self.stop_token_ids:
            # A new set: the one passed in is the caller's.
            self.all_stop_token_ids = self.all_stop_token_ids.union(self.stop_token_ids)
        if self.skip_reading_prefix_cache is None:
            self.skip_reading_prefix_cache = self.prompt_logprobs is not None


def logprobs_width(num_logprobs: int, vocab_size: int) -> int:
    """Columns of a row of log probabilities: the token itself, then so many."""
    return 1 + (vocab_size if num_logprobs == ALL_LOGPROBS else num_logprobs)


def _output_kind(value: int) -> RequestOutputKind:
    """The kind that a plain number means: callers count as vLLM's do, readers compare by identity.

    Raises:
        RequestError: it means none.
    """
    try:
        return RequestOutputKind(value)
    except ValueError as error:
        raise RequestError(f"output_kind must be 0, 1 or 2, got {value!r}") from error


def _require(holds: bool, field: str, value: object, allowed: str) -> None:
    if not holds:
        raise RequestError(f"{field} must be {allowed}, got {value!r}")
