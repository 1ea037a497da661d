"""The words that the core and an executor share: a step's plan, its result, and commands.

Pure. A *slot* is the place of a running request's row in the executor, ``0 <= slot <
max_num_seqs``. Plans are deltas to the executor's persistent rows; rule numbers are those of
``docs/design/pipeline.md``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from trio_engine.outputs import LogprobsLists, LogprobsTensors
from trio_engine.requests import LoRARequest
from trio_engine.sampling_params import SamplingParams
from trio_engine.tensors import TensorData

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

NO_TOKEN = -1
"""In ``StepResult.token_ids``: this row has not reached its last known token (prefill chunk)."""


class ExecutorProperties(msgspec.Struct, frozen=True, kw_only=True):
    """What a loaded executor is, as announced to front ends and checked at admission.

    ``max_model_len``: prompt and output tokens of one request. ``num_blocks`` blocks of
    ``block_size`` tokens each hold the KV cache. ``dtype`` is torch's name of the weights' type.
    ``default_max_num_batched_tokens`` keeps a step short enough on this device for a signal or an
    abort to be answered soon. ``hidden_size`` is that of a prompt embedding; None if the executor
    takes none.
    """

    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    dtype: str = "float32"
    default_max_num_batched_tokens: int = 8192
    hidden_size: int | None = None


class RowMatcher(Protocol):
    """How far the output of one row has come in its grammar (``structured.matcher``).

    Attributes:
        is_over: whether nothing may follow any more.
        failure: why, unless it is because the grammar has ended.
        may_only_end: whether the mask filled last allows nothing but tokens that end the request.
    """

    is_over: bool
    failure: str | None
    may_only_end: bool

    def fill(self, words: NDArray[np.uint32]) -> None:
        """Writes which tokens may be next, 32 to a word."""
        ...

    def accept(self, token_id: int) -> None:
        """Goes on by a token."""
        ...


class RowGrammar(Protocol):
    """The grammar of one request, compiled. The core hands it on and knows nothing of it."""

    def start(self, output_token_ids: Sequence[int], end_token_ids: Iterable[int]) -> RowMatcher:
        """A matcher that has accepted the output so far."""
        ...


class NewRow(msgspec.Struct, kw_only=True):
    """A row that starts, or starts again after preemption, a reset or a failed step.

    The executor replaces whatever its slot held.

    Attributes:
        slot: the row's place.
        request_id: for log lines and error messages only; two clients may use the same.
        token_ids: every token known so far, prompt then output.
        num_prompt_tokens: how many of them are the prompt.
        num_computed_tokens: how many leading tokens have their KV in ``block_ids`` already.
        block_ids: the row's block table so far.
        sampling_params: as admitted; not to be changed.
        lora_request: adapter of the row, None for none.
        prompt_embeds: ``[num_prompt_tokens, hidden]`` or None. In its place ``token_ids`` has 0.
        prompt_is_token_ids: at which positions the id counts and not the embedding; None where
            there are embeddings means nowhere.
        grammar: that its output follows, None for any output.

    A row whose params ask for ``prompt_logprobs`` and that has no output yet starts with
    ``num_computed_tokens`` 0: nothing is known of tokens that are not computed.
    """

    slot: int
    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: list[int]
    sampling_params: SamplingParams
    lora_request: LoRARequest | None = None
    prompt_embeds: TensorData | None = None
    prompt_is_token_ids: list[bool] | None = None
    grammar: RowGrammar | None = None

    @property
    def lora_id(self) -> int:
        """Number of the row's adapter, 0 for none."""
        return 0 if self.lora_request is None else self.lora_request.lora_int_id


class StepPlan(msgspec.Struct, kw_only=True):
    """One forward pass over some of the rows.

    Applied in this order: ``reset``, ``finished_slots``, ``new_rows``, ``new_block_ids``; then
    row ``slots[i]`` computes its next ``num_scheduled_tokens[i]`` tokens. A row whose last known
    token is among them samples one token, which the *executor* appends to the row: the next plan
    may schedule it before the core has heard of it. Other rows sample nothing.

    Attributes:
        plan_id: rises by one with each plan of an engine.
        slots: distinct, in scheduling order. May be the same object as in the plan before, then
            it is the same batch; neither side changes it.
        num_scheduled_tokens: aligned with ``slots``, each >= 1.
        new_rows: rows to set up.
        new_block_ids: per slot, blocks to append to the row's block table.
        finished_slots: rows to drop.
        reset: drop every row first (after a failed step, plans between were never run).
    """

    plan_id: int
    slots: Sequence[int]
    num_scheduled_tokens: Sequence[int]
    new_rows: list[NewRow] = msgspec.field(default_factory=list)
    new_block_ids: list[tuple[int, list[int]]] = msgspec.field(default_factory=list)
    finished_slots: list[int] = msgspec.field(default_factory=list)
    reset: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens that the forward pass computes."""
        return sum(self.num_scheduled_tokens)


class StepResult(msgspec.Struct, kw_only=True):
    """What one plan gave, aligned with its ``slots``.

    Attributes:
        plan_id: of the plan.
        token_ids: the sampled token of each row, or ``NO_TOKEN``.
        logprobs: per slot, one row each, for rows that asked and got a token. Raw: after the
            grammar's mask and before anything else that sampling does.
        prompt_logprobs: per slot, for rows that asked and got the first token of their output.
        num_nans_in_logits: per slot, where there were any.
        grammar_ends: per slot, where nothing may follow this token: None if the grammar has ended,
            else why the row cannot go on, and its token does not count.

    Arrays have the width that ``sampling_params.logprobs_width`` says, do not change any more,
    and are no views of larger ones, which a slow client would keep alive.
    """

    plan_id: int
    token_ids: list[int]
    logprobs: dict[int, LogprobsLists] | None = None
    prompt_logprobs: dict[int, LogprobsTensors] | None = None
    num_nans_in_logits: dict[int, int] | None = None
    grammar_ends: dict[int, str | None] | None = None


class DeviceCommand(msgspec.Struct, kw_only=True):
    """Something other than a step for the forward thread, in the order of the plans (rule 7).

    Attributes:
        command_id: by which the answer is matched.
        method: name that the executor knows; an unknown one is a failure answer, not fatal.
        args: positional arguments.
    """

    command_id: int
    method: str
    args: tuple[Any, ...] = ()
