"""A request inside the core: its tokens, what is planned of them, and what it holds.

Pure. Counts of tokens, for a request with an unsettled token (sampled, not known here yet):

    token_ids    [ prompt ........ | output ....... ]
    all tokens   ------------------------------------- + num_unsettled_tokens
    num_planned_tokens   the leading tokens whose KV is computed once all plans in flight ran

The scheduler owns ``slot``, ``block_ids``, ``num_planned_tokens`` and
``num_unsettled_tokens``; ``EngineCore.update`` alone appends tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trio_engine.core.lifecycle import RequestEvent, RequestStatus, next_status

if TYPE_CHECKING:
    from trio_engine.outputs import EngineCoreEvent, PrefillStats
    from trio_engine.requests import EngineCoreRequest
    from trio_engine.sampling_params import RepetitionDetectionParams, SamplingParams

NO_SLOT = -1


class Request:
    """One admitted request. Compared and hashed by identity: ids are used again.

    Args:
        source: the request as it came, already admitted (``admission.check_request``).
        params: its sampling parameters.
        max_model_len: of the engine, in tokens.
    """

    __slots__ = (
        "block_ids",
        "client_index",
        "eos_token_id",
        "events",
        "is_resident",
        "max_total_tokens",
        "min_tokens",
        "num_planned_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_unsettled_tokens",
        "prefill_stats",
        "repetition_detection",
        "request_id",
        "sampling_params",
        "slot",
        "status",
        "stop_token_ids",
        "token_ids",
        "trace_headers",
    )

    def __init__(
        self, source: EngineCoreRequest, params: SamplingParams, max_model_len: int
    ) -> None:
        prompt = source.prompt_token_ids or []
        max_tokens = max_model_len if params.max_tokens is None else params.max_tokens
        self.client_index = source.client_index
        self.request_id = source.request_id
        self.sampling_params: SamplingParams = params
        self.token_ids: list[int] = list(prompt)
        self.num_prompt_tokens = len(prompt)
        self.max_total_tokens = min(len(prompt) + max_tokens, max_model_len)
        self.trace_headers = source.trace_headers

        self.min_tokens = params.min_tokens
        self.eos_token_id = params.eos_token_id
        self.stop_token_ids = frozenset(params.stop_token_ids or ())
        self.repetition_detection: RepetitionDetectionParams | None = params.repetition_detection

        self.status = RequestStatus.WAITING
        self.slot = NO_SLOT
        # Whether the executor has its row; if not, the next plan that runs it sends the row.
        self.is_resident = False
        self.block_ids: list[int] = []
        self.num_planned_tokens = 0
        self.num_unsettled_tokens = 0
        self.num_preemptions = 0
        # Collected until the next output entry takes them along.
        self.events: list[EngineCoreEvent] = []
        self.prefill_stats: PrefillStats | None = None

    @property
    def key(self) -> tuple[int, str]:
        """By what it is found: another client may use the same id."""
        return (self.client_index, self.request_id)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated and known."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_tokens_to_plan(self) -> int:
        """Tokens to compute before its next sample; 0 when its last token is drawn (rule 4)."""
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
        return (
            f"<Request {self.request_id!r} of client {self.client_index} {self.status.value}"
            f" prompt={self.num_prompt_tokens} output={self.num_output_tokens}"
            f"+{self.num_unsettled_tokens} planned={self.num_planned_tokens}"
            f" blocks={len(self.block_ids)}>"
        )
