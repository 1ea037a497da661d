"""The rows that persist between steps: what each running request's next step needs.

Layer: model. Applies the deltas of a plan, and finds plans that contradict the rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trio_engine.errors import RequestStepError, StepError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from trio_engine.core.plan import NewRow, StepPlan


class Rows:
    """Token histories and block tables by slot, as arrays that a batch is cut from.

    Args:
        vocab_size: token ids are below it.
        max_num_seqs: slots.
        max_model_len: tokens of one row.
        block_size: tokens of a KV block.
        num_blocks: KV blocks; the number itself is the null block.

    Attributes:
        token_ids: ``[max_num_seqs, max_model_len + 1]`` int32, valid below ``num_settled``. The
            spare place takes the token that a pipeline may waste.
        num_tokens: ``[max_num_seqs]``: tokens of the row, the unsettled one included.
        num_settled: tokens of the row whose value the host knows.
        num_prompt: how many of them are the prompt.
        num_computed: how many have their KV.
        generation: rises whenever a slot is set up or dropped.
        lora_ids: the row's adapter, 0 for none.
        block_tables: ``[max_num_seqs, max_blocks]`` int32, null block beyond the row's own.
    """

    def __init__(
        self,
        vocab_size: int,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        num_blocks: int,
    ) -> None:
        self._vocab_size = vocab_size
        self._block_size = block_size
        self._null_block = num_blocks
        # Zeros are not resident before they are written: 256 rows of 128k tokens cost nothing.
        self.token_ids = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int32)
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_settled = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_prompt = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_computed = np.zeros(max_num_seqs, dtype=np.int64)
        self.generation = np.zeros(max_num_seqs, dtype=np.int64)
        self.lora_ids = np.zeros(max_num_seqs, dtype=np.int64)
        width = -(-(max_model_len + 1) // block_size)
        self.block_tables = np.full((max_num_seqs, width), num_blocks, dtype=np.int32)
        self._num_blocks = np.zeros(max_num_seqs, dtype=np.int64)

    def apply(self, plan: StepPlan) -> list[int]:
        """Applies a plan's deltas.

        Returns:
            The blocks whose contents nobody wants any more: those beyond a new row's computed
            tokens, and those appended to a running row. No other row may be reading them.

        Raises:
            RequestStepError: a new row has token ids outside the vocabulary.
            StepError: a slot, block or length out of range; rows may be partly changed.
        """
        if plan.reset:
            for slot in np.flatnonzero(self.num_tokens).tolist():
                self._drop(slot)
        # After a reset the finished rows are gone too, and some of them never came here.
        for slot in () if plan.reset else plan.finished_slots:
            self._drop(self._checked(slot))
        fresh: list[int] = []
        for row in plan.new_rows:
            fresh += self._set_up(row)
        for slot, block_ids in plan.new_block_ids:
            self._append_blocks(self._checked(slot), block_ids)
            fresh += block_ids
        return fresh

    def num_output(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Output tokens of each row, the unsettled one included."""
        return self.num_tokens[slots] - self.num_prompt[slots]

    def settled_output(self, slot: int) -> NDArray[np.int32]:
        """The output tokens of a row whose values the host knows; a view."""
        return self.token_ids[slot, self.num_prompt[slot] : self.num_settled[slot]]

    def check_scheduled(self, slots: NDArray[np.int64], num_scheduled: NDArray[np.int64]) -> None:
        """Finds a step that no rows can run.

        Raises:
            StepError: a slot is empty or twice there, a count is below 1, or a row has not that
                many tokens or blocks left.
        """
        if slots.size != num_scheduled.size or np.unique(slots).size != slots.size:
            raise StepError(f"slots {slots.tolist()} are not distinct or not one per count")
        if (
            slots.min() < 0
            or slots.max() >= self.num_tokens.size
            or not self.num_tokens[slots].all()
        ):
            raise StepError(f"slots {slots.tolist()} do not all hold a row")
        ends = self.num_computed[slots] + num_scheduled
        bad = (num_scheduled < 1) | (ends > self.num_tokens[slots])
        bad |= ends > self._num_blocks[slots] * self._block_size
        if bad.any():
            index = int(bad.argmax())
            slot = int(slots[index])
            raise StepError(
                f"slot {slot}: {int(num_scheduled[index])} tokens are scheduled after "
                f"{int(self.num_computed[slot])} of {int(self.num_tokens[slot])}, with "
                f"{int(self._num_blocks[slot])} blocks"
            )

    def append_unsettled(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Adds a token of unknown value to rows.

        Returns:
            Its position in each row.

        Raises:
            StepError: a row is full.
        """
        positions = self.num_tokens[slots]
        if slots.size and positions.max() >= self.token_ids.shape[1]:
            raise StepError(f"slot {int(slots[positions.argmax()])} samples beyond max_model_len")
        self.num_tokens[slots] += 1
        return positions

    def settle(
        self,
        slots: NDArray[np.int64],
        generations: NDArray[np.int64],
        positions: NDArray[np.int64],
        token_ids: NDArray[np.int64],
    ) -> None:
        """Fills in tokens whose value is known now, in rows that still are what they were."""
        alive = self.generation[slots] == generations
        slots, positions = slots[alive], positions[alive]
        self.token_ids[slots, positions] = token_ids[alive]
        self.num_settled[slots] = positions + 1

    def _checked(self, slot: int) -> int:
        if not (0 <= slot < self.num_tokens.size and self.num_tokens[slot]):
            raise StepError(f"slot {slot} holds no row")
        return slot

    def _drop(self, slot: int) -> None:
        self.block_tables[slot, : self._num_blocks[slot]] = self._null_block
        self._num_blocks[slot] = 0
        self.num_tokens[slot] = 0
        self.generation[slot] += 1

    def _set_up(self, row: NewRow) -> Sequence[int]:
        num_tokens, slot = len(row.token_ids), row.slot
        if not (0 <= slot < self.num_tokens.size and 0 < num_tokens < self.token_ids.shape[1]):
            raise StepError(f"request {row.request_id}: {num_tokens} tokens in slot {slot}")
        if not 0 <= row.num_computed_tokens < num_tokens:
            raise StepError(f"request {row.request_id}: {row.num_computed_tokens} are computed")
        token_ids = np.array(row.token_ids, dtype=np.int64)
        if token_ids.min() < 0 or token_ids.max() >= self._vocab_size:
            # Admission refuses them; here one would end the engine, or on CUDA the device.
            message = f"request {row.request_id}: token ids outside 0-{self._vocab_size - 1}"
            raise RequestStepError(message, slots=[slot])
        self._drop(slot)
        self.token_ids[slot, :num_tokens] = token_ids
        self.num_tokens[slot] = self.num_settled[slot] = num_tokens
        self.num_prompt[slot] = row.num_prompt_tokens
        self.num_computed[slot] = row.num_computed_tokens
        self.lora_ids[slot] = row.lora_id
        self._append_blocks(slot, row.block_ids)
        return row.block_ids[-(-row.num_computed_tokens // self._block_size) :]

    def _append_blocks(self, slot: int, block_ids: Sequence[int]) -> None:
        start = int(self._num_blocks[slot])
        stop = start + len(block_ids)
        if stop > self.block_tables.shape[1]:
            raise StepError(f"slot {slot}: {stop} blocks are more than max_model_len needs")
        if block_ids and (min(block_ids) < 0 or max(block_ids) >= self._null_block):
            raise StepError(f"slot {slot}: no such blocks: {list(block_ids)}")
        self.block_tables[slot, start:stop] = block_ids
        self._num_blocks[slot] = stop
