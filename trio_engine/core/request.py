"""A request inside the core: its tokens, what is planned of them, and what it holds.

Pure. Counts of tokens, for a request with an unsettled token (sampled, not known here yet):

    token_ids    [ prompt ........ | output ....... ]
    all tokens   ------------------------------------- + num_unsettled_tokens
    num_planned_tokens   the leading tokens whose KV is computed once all plans in flight ran

The scheduler owns ``slot``, the blocks and the counts of planned and unsettled tokens;
``TokenDelivery`` alone appends tokens.
"""

from __future__ import annotations

from array import array
from itertools import chain
from typing import TYPE_CHECKING

from trio_engine.core.block_hash import root_hash
from trio_engine.core.lifecycle import RequestEvent, RequestStatus, next_status
from trio_engine.core.prompt import prompt_token_ids

if TYPE_CHECKING:
    from trio_engine.core.plan import RowGrammar
    from trio_engine.outputs import EngineCoreEvent, PrefillStats
    from trio_engine.requests import EngineCoreRequest
    from trio_engine.sampling_params import RepetitionDetectionParams, SamplingParams

NO_SLOT = -1

Turn = tuple[int, float, int]
"""Order among requests, smallest first: priority, arrival time, number of its admission."""


class Request:
    """One admitted request. Compared and hashed by identity: ids are used again.

    Args:
        source: the request as it came, already admitted (``admission.Admission``).
        params: its sampling parameters.
        max_model_len: of the engine, in tokens.
    """

    __slots__ = (
        "arrival_time",
        "asks_logprobs",
        "block_hashes",
        "block_ids",
        "client_index",
        "decode_due",
        "decode_offset",
        "eos_token_id",
        "events",
        "grammar",
        "is_caught_up",
        "is_plain",
        "is_resident",
        "life",
        "lora_request",
        "max_total_tokens",
        "min_tokens",
        "num_cached_tokens",
        "num_findable_blocks",
        "num_planned_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_unsettled_tokens",
        "prefill_stats",
        "priority",
        "prompt_embeds",
        "prompt_is_token_ids",
        "repetition_detection",
        "request_id",
        "root_hash",
        "sampling_params",
        "slot",
        "status",
        "stop_token_ids",
        "token_ids",
        "trace_headers",
        "turn",
        "unsent_text_bytes",
        "watched_length",
        "watched_token_ids",
    )

    def __init__(
        self, source: EngineCoreRequest, params: SamplingParams, max_model_len: int
    ) -> None:
        # As 32-bit integers: a long prompt that waits takes a tenth of what a list would.
        self.token_ids: array[int] = array("i", prompt_token_ids(source))
        max_tokens = max_model_len if params.max_tokens is None else params.max_tokens
        self.client_index = source.client_index
        self.request_id = source.request_id
        # Stands for this life of its id where nothing else counts: what is unsent of a request
        # that has ended must not keep its prompt in memory.
        self.life = object()
        self.sampling_params: SamplingParams = params
        self.num_prompt_tokens = len(self.token_ids)
        self.max_total_tokens = min(self.num_prompt_tokens + max_tokens, max_model_len)
        self.prompt_embeds = source.prompt_embeds
        self.prompt_is_token_ids = source.prompt_is_token_ids
        self.lora_request = source.lora_request
        self.priority, self.arrival_time = source.priority, source.arrival_time
        self.trace_headers = source.trace_headers
        # Of the texts in each unsent entry of it: see ``outbox``.
        self.unsent_text_bytes = len(source.request_id)
        if source.trace_headers is not None:
            self.unsent_text_bytes += sum(map(len, chain(*source.trace_headers.items())))
        self.asks_logprobs = params.num_logprobs is not None or params.prompt_logprobs is not None

        self.min_tokens = params.min_tokens
        self.eos_token_id = params.eos_token_id
        self.stop_token_ids = frozenset(params.stop_token_ids or ())
        self.repetition_detection: RepetitionDetectionParams | None = params.repetition_detection
        # Most tokens cannot end a request, and ``check_stop`` need not look at them: they are none
        # of these, and it is shorter than this with them.
        self.watched_token_ids = self.stop_token_ids | {params.eos_token_id}
        self.watched_length = self.max_total_tokens if self.repetition_detection is None else 0

        has_grammar = params.structured_outputs is not None
        # Whether there is nothing to tell of it but tokens, and only these and its length end it.
        self.is_plain = not (
            has_grammar
            or self.asks_logprobs
            or self.repetition_detection is not None
            or self.trace_headers is not None
        )
        self.status = RequestStatus.WAITING_FOR_GRAMMAR if has_grammar else RequestStatus.WAITING
        self.grammar: RowGrammar | None = None
        self.slot = NO_SLOT
        # Whether the executor has its row; if not, the next plan that runs it sends the row.
        self.is_resident = False
        self.turn: Turn = (0, 0.0, 0)
        self.num_planned_tokens = self.num_unsettled_tokens = self.num_preemptions = 0
        # See ``decode_batch``, which counts for its members what the two above count for others.
        self.decode_offset: int | None = None
        self.decode_due = 0
        # Whether a plan has settled, since it got its blocks, that left but the newest token to
        # compute: then all known tokens but the newest are computed in these blocks.
        self.is_caught_up = False
        self.block_ids: list[int] = []
        # See ``kv_cache``. Hashes outlive the blocks: the tokens that they stand for stay.
        self.num_cached_tokens = self.num_findable_blocks = 0
        self.root_hash = root_hash(source)
        self.block_hashes: list[bytes] = []
        # Collected until the next output entry takes them along.
        self.events: list[EngineCoreEvent] = []
        self.prefill_stats: PrefillStats | None = None

    @property
    def key(self) -> tuple[int, str]:
        """By what it is found: another client may use the same id."""
        return (self.client_index, self.request_id)

    @property
    def lora_id(self) -> int:
        """Number of its adapter, 0 for none."""
        return 0 if self.lora_request is None else self.lora_request.lora_int_id

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated and known."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether a row of it starts at its first token, whatever is cached or was computed.

        Log probabilities of the prompt are told once and whole, with the first token of the
        output, and its row has those of what it computed itself.
        """
        return self.sampling_params.prompt_logprobs is not None and not self.num_output_tokens

    @property
    def may_read_prefix_cache(self) -> bool:
        """Whether it may begin with blocks that others have computed."""
        return not (self.sampling_params.skip_reading_prefix_cache or self.needs_whole_prompt)

    @property
    def num_tokens_to_plan(self) -> int:
        """Tokens to compute before its next sample; 0 when its last token is drawn (rule 4).

        Not of a member of the decode batch, which computes one.
        """
        num_tokens = len(self.token_ids) + self.num_unsettled_tokens
        if num_tokens >= self.max_total_tokens:
            return 0
        return num_tokens - self.num_planned_tokens

    @property
    def is_finished(self) -> bool:
        """Whether its terminal event has happened."""
        return self.status is RequestStatus.FINISHED

    def advance(self, event: RequestEvent) -> None:
        """Moves its status; an impossible event is a bug of the core (AssertionError)."""
        self.status = next_status(self.status, event)

    def __repr__(self) -> str:
        planned = f"+{self.num_unsettled_tokens} planned={self.num_planned_tokens}"
        if self.decode_offset is not None:
            planned = " in the decode batch"
        return (
            f"<Request {self.request_id!r} of client {self.client_index} {self.status.value}"
            f" prompt={self.num_prompt_tokens} output={self.num_output_tokens}{planned}"
            f" blocks={len(self.block_ids)}>"
        )
