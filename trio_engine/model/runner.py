"""Runs plans on the model: rows, batch, forward pass, sampling, result.

Layer: model. Knows the core only by the words of ``core.plan``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from trio_engine.errors import RequestStepError, StepError, UtilityError
from trio_engine.model.attention import AttentionView, PrefillChunk
from trio_engine.model.attention_layout import gather_bytes
from trio_engine.model.batch import Batch, BatchBuilder, StepLayout, lay_out
from trio_engine.model.decode_graphs import DecodeGraphs
from trio_engine.model.device import out_of_memory_as, to_device
from trio_engine.model.grammar_masks import GrammarMasks
from trio_engine.model.in_flight import SampledOnHost, SampledRows, StepInFlight
from trio_engine.model.lora import LoRAAdapters
from trio_engine.model.lora_loader import load_adapter
from trio_engine.model.prompt_embeds import PromptEmbeds
from trio_engine.model.prompt_logprobs import PromptLogprobs
from trio_engine.model.rows import Rows
from trio_engine.model.sampler import Sampler

if TYPE_CHECKING:
    from torch import Tensor

    from trio_engine.core.plan import StepPlan
    from trio_engine.model.decode_graphs import GraphSize, Recorder
    from trio_engine.model.decoder import Decoder
    from trio_engine.model.kv_cache import KVCache
    from trio_engine.requests import LoRARequest


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
        recorder: records steps in which all rows decode, so that they can be replayed; see
            ``DecodeGraphs``. None computes them like all others.

    Attributes:
        adapters: that rows may use.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        *,
        max_num_seqs: int,
        max_model_len: int,
        launches_ahead: bool,
        recorder: Recorder | None = None,
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
        self._sampler = Sampler(self._rows, model.vocab_size, self._device)
        self._grammars = GrammarMasks(self._sampler.options, self._device)
        self._prompt_logprobs = PromptLogprobs(self._rows, model.vocab_size, decoder.score)
        self._prompt_embeds = PromptEmbeds(self._rows, model.hidden_size, self._device, self._dtype)
        self.adapters = LoRAAdapters()
        self._batches = BatchBuilder(
            self._rows, cache, model, self.adapters, self._device, self._dtype
        )
        self._graphs: DecodeGraphs | None = None
        if recorder is not None:
            room = gather_bytes(self._device)
            self._graphs = DecodeGraphs(
                decoder, cache, self._rows, gather_bytes=room, recorder=recorder
            )
        # The newest token of each row, where the next step finds it without asking the host.
        self._last_tokens: Tensor | None = None
        if launches_ahead:
            self._last_tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=self._device)

    @property
    def launches_ahead(self) -> bool:
        """Whether a plan may be launched before the one before it is settled."""
        return self._last_tokens is not None

    def forget_graphs(self) -> None:
        """To be called before memory is given back that recorded steps use."""
        if self._graphs is not None:
            self._graphs.forget()

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
            RequestStepError: a new row has token ids outside the vocabulary, embeddings of another
                size, or an adapter that is not here.
            StepError: the plan contradicts the rows, or memory ran out.
        """
        self._check_adapters(plan)
        with out_of_memory_as(StepError, f"computing {plan.num_tokens} tokens"):
            fresh_blocks = self._rows.apply(plan)
            self._sampler.apply(plan)
            self._grammars.apply(plan)
            self._prompt_logprobs.apply(plan)
            self._prompt_embeds.apply(plan)
            if fresh_blocks:
                self._cache.clear(to_device(np.array(fresh_blocks, dtype=np.int64), self._device))
            return self._run(plan)

    def load_adapter(self, request: LoRARequest, *, max_rank: int) -> None:
        """Reads an adapter for rows to use, in place of one of the same id.

        Raises:
            ModelError: missing, damaged, unsupported or for another model.
            UtilityError: memory ran out.
        """
        with out_of_memory_as(UtilityError, f"loading adapter {request.lora_name!r}"):
            adapter = load_adapter(
                request.lora_path,
                request.lora_int_id,
                self._decoder.config,
                max_rank=max_rank,
                dtype=self._dtype,
                device=self._device,
            )
        self.adapters.add(adapter)

    def _check_adapters(self, plan: StepPlan) -> None:
        lost = [row for row in plan.new_rows if row.lora_id and row.lora_id not in self.adapters]
        if lost:
            raise RequestStepError(
                f"request {lost[0].request_id}: adapter {lost[0].lora_id} is not loaded",
                slots=[row.slot for row in lost],
            )

    def _run(self, plan: StepPlan) -> StepInFlight:
        slots = np.array(plan.slots, dtype=np.int64)
        counts = np.array(plan.num_scheduled_tokens, dtype=np.int64)
        if not slots.size:
            return StepInFlight(plan, self._rows, None)
        self._rows.check_scheduled(slots, counts)
        layout = lay_out(self._rows, slots, counts)
        embeds = self._prompt_embeds.of(layout)
        size = None if self._graphs is None or embeds is not None else self._graphs.size_of(layout)
        batch = self._batches.build(layout, self._last_tokens, embeds, size)
        hidden = self._forward(batch, size)
        self._prompt_logprobs.add(layout, hidden)
        self._rows.num_computed[layout.slots] += layout.counts
        if batch.sampling_tokens is None:
            return StepInFlight(plan, self._rows, None)
        logits = self._decoder.score(hidden.index_select(0, batch.sampling_tokens))
        return self._sample(plan, layout, logits)

    def _forward(self, batch: Batch, size: GraphSize | None) -> Tensor:
        if size is None:
            return self._decoder.forward(batch, self._cache)
        assert self._graphs is not None, "a size is a graph's"
        return self._graphs.forward(batch, size)

    def _sample(self, plan: StepPlan, layout: StepLayout, logits: Tensor) -> StepInFlight:
        rows = self._rows
        slots = layout.slots[layout.sampling]
        matchers = self._grammars.mask(logits, slots)
        sampled = self._sampler.sample(logits, slots, self._last_tokens, finds_lost=bool(matchers))
        step = SampledRows(
            plan_indices=layout.order[layout.sampling],
            slots=slots,
            generations=rows.generation[slots],
            positions=rows.append_unsettled(slots),
            on_host=SampledOnHost(sampled),
            prompts=self._prompt_logprobs.take(slots),
            matchers=matchers,
        )
        in_flight = StepInFlight(plan, rows, step)
        if self._last_tokens is None:
            in_flight.settle()
        else:
            self._last_tokens.index_copy_(0, to_device(slots, self._device), sampled.token_ids)
            self._grammars.note_step(in_flight)
        return in_flight
