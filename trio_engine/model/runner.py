"""Runs plans on the model: rows, batch, forward pass, sampling, result.

Layer: model. Knows the core only by the words of ``core.plan``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from trio_engine.errors import StepError
from trio_engine.model.attention import AttentionView, PrefillChunk
from trio_engine.model.batch import Batch, BatchBuilder, StepLayout, lay_out
from trio_engine.model.device import out_of_memory_as, to_device
from trio_engine.model.in_flight import SampledOnHost, SampledRows, StepInFlight
from trio_engine.model.rows import Rows
from trio_engine.model.sampler import Sampler
from trio_engine.model.sampling_rows import SamplingRows

if TYPE_CHECKING:
    from torch import Tensor

    from trio_engine.core.plan import StepPlan
    from trio_engine.model.decoder import Decoder
    from trio_engine.model.kv_cache import KVCache


class ModelRunner:
    """Holds the rows and runs one plan after the other.

    Counterpart: ``vllm/v1/worker/gpu_model_runner.py``.

    Args:
        decoder: the model.
        cache: its KV cache.
        max_num_seqs: slots.
        max_model_len: tokens of one row.
        launches_ahead: leave sampled tokens on the device until ``StepInFlight.settle``, so that
            the next plan can start before. A device without a queue of its own gains nothing.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        *,
        max_num_seqs: int,
        max_model_len: int,
        launches_ahead: bool,
    ) -> None:
        model = decoder.config
        self._decoder = decoder
        self._cache = cache
        self._device, self._dtype = decoder.device, decoder.dtype
        self._rows = Rows(
            model.vocab_size,
            max_num_seqs,
            max_model_len,
            cache.shape.block_size,
            cache.num_blocks,
        )
        self._sampling_rows = SamplingRows(max_num_seqs, model.vocab_size)
        self._sampler = Sampler(self._sampling_rows)
        self._batches = BatchBuilder(self._rows, cache, model, self._device, self._dtype)
        # The newest token of each row, where the next step finds it without asking the host.
        self._last_tokens: Tensor | None = None
        if launches_ahead:
            self._last_tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=self._device)

    @property
    def launches_ahead(self) -> bool:
        """Whether a plan may be launched before the one before it is settled."""
        return self._last_tokens is not None

    def synchronize(self) -> None:
        """Waits until the device has done all that was launched."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    @torch.inference_mode()
    def run_dummy_batch(self) -> None:
        """Computes a step of one token that belongs to no row, and waits for it."""
        zero = torch.zeros(1, dtype=torch.int64, device=self._device)
        null_block = zero + self._cache.null_block
        alone = PrefillChunk(0, 1, block_ids=None, first_key=0, num_keys=1, mask=None)
        view = AttentionView((), (alone,))
        batch = Batch(
            token_ids=zero,
            positions=zero,
            slots=null_block * self._cache.shape.block_size,
            sampling_tokens=zero,
            full=view,
            sliding=view,
        )
        self._decoder.forward(batch, self._cache)
        self._cache.clear(null_block)  # rows read it as padding: it must stay as it was
        self.synchronize()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepInFlight:
        """Applies a plan's deltas and starts its forward pass.

        Raises:
            RequestStepError: a new row has token ids outside the vocabulary.
            StepError: the plan contradicts the rows, or memory ran out.
        """
        with out_of_memory_as(StepError, f"computing {plan.num_tokens} tokens"):
            fresh_blocks = self._rows.apply(plan)
            for row in plan.new_rows:
                self._sampling_rows.set_up(row.slot, row.sampling_params)
            if fresh_blocks:
                self._cache.clear(to_device(np.array(fresh_blocks, dtype=np.int64), self._device))
            return self._run(plan)

    def _run(self, plan: StepPlan) -> StepInFlight:
        slots = np.array(plan.slots, dtype=np.int64)
        counts = np.array(plan.num_scheduled_tokens, dtype=np.int64)
        if not slots.size:
            return StepInFlight(plan, self._rows, None)
        self._rows.check_scheduled(slots, counts)
        layout = lay_out(self._rows, slots, counts)
        logits = self._decoder.forward(self._batches.build(layout, self._last_tokens), self._cache)
        self._rows.num_computed[layout.slots] += layout.counts
        if logits is None:
            return StepInFlight(plan, self._rows, None)
        return self._sample(plan, layout, logits)

    def _sample(self, plan: StepPlan, layout: StepLayout, logits: Tensor) -> StepInFlight:
        rows = self._rows
        slots = layout.slots[layout.sampling]
        num_output = rows.num_tokens[slots] - rows.num_prompt[slots]
        sampled = self._sampler.sample(logits, slots, num_output)
        step = SampledRows(
            plan_indices=layout.order[layout.sampling],
            slots=slots,
            generations=rows.generation[slots],
            positions=rows.append_unsettled(slots),
            on_host=SampledOnHost(sampled),
        )
        in_flight = StepInFlight(plan, rows, step)
        if self._last_tokens is None:
            in_flight.settle()
        else:
            self._last_tokens.index_copy_(0, to_device(slots, self._device), sampled.token_ids)
        return in_flight
