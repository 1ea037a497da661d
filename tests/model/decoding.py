"""Drives the model without the engine: logits of a decoder, tokens of an executor.

Block ids are dealt from a shuffled deck, so that nothing works by neighbouring blocks alone.
"""

from __future__ import annotations

import random
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from trio_engine.core.plan import NO_TOKEN, ExecutorProperties, NewRow, StepPlan, StepResult
from trio_engine.errors import RequestError
from trio_engine.executor.adapters import Adapters
from trio_engine.model.batch import BatchBuilder, lay_out
from trio_engine.model.decoder import Decoder
from trio_engine.model.kv_cache import KVCache, KVCacheShape
from trio_engine.model.loader import open_checkpoint
from trio_engine.model.lora import LoRAAdapters
from trio_engine.model.rows import Rows
from trio_engine.model.runner import ModelRunner
from trio_engine.model.weights import WeightForm, load_weights
from trio_engine.requests import LoRARequest
from trio_engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trio_engine.checkpoint import ModelFiles
    from trio_engine.config import EngineConfig, LinearBackendName, QuantizationName
    from trio_engine.core.plan import DeviceCommand
    from trio_engine.model.in_flight import StepInFlight

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0, max_tokens=None)


CPU_CAPABILITY = torch.backends.cpu.get_cpu_capability()
HAS_INT4 = CPU_CAPABILITY in ("AVX2", "AVX512")
NEEDS_INT4 = pytest.mark.skipif(
    not HAS_INT4, reason=f"int4 needs AVX2 or AVX-512, and torch uses {CPU_CAPABILITY}"
)


def load_decoder(
    files: ModelFiles,
    dtype: torch.dtype = torch.float32,
    quantization: QuantizationName | None = None,
    linear_backend: LinearBackendName = "torch",
) -> Decoder:
    checkpoint = open_checkpoint(files)
    weights = load_weights(checkpoint.config, checkpoint.tensors(), dtype, CPU)
    form = WeightForm(quantization=quantization, linear_backend=linear_backend)
    return Decoder(checkpoint.config, form.apply(weights))


class BlockDeck:
    """Deals block ids in random order."""

    def __init__(self, num_blocks: int, seed: int = 0) -> None:
        self._ids = list(range(num_blocks))
        random.Random(seed).shuffle(self._ids)

    def deal(self, num_blocks: int) -> list[int]:
        return [self._ids.pop() for _ in range(num_blocks)]

    def take_back(self, block_ids: list[int]) -> None:
        self._ids[:0] = block_ids


class LogitsProbe:
    """Computes any tokens of any rows and shows the logits of every one of them."""

    def __init__(self, decoder: Decoder, block_size: int = 4, max_num_seqs: int = 4) -> None:
        self._decoder, self._block_size = decoder, block_size
        shape = KVCacheShape.of(decoder.config, block_size, decoder.dtype)
        num_blocks = 4096 // block_size
        self._cache = KVCache(shape, num_blocks, CPU, decoder.dtype)
        self._rows = Rows(decoder.config.vocab_size, max_num_seqs, 512, block_size, num_blocks)
        self._deck = BlockDeck(num_blocks)
        model = decoder.config
        self.adapters = LoRAAdapters()
        self._builder = BatchBuilder(
            self._rows, self._cache, model, self.adapters, CPU, decoder.dtype
        )

    def add(self, slot: int, token_ids: Sequence[int], *, lora_id: int = 0) -> None:
        blocks = self._deck.deal(-(-len(token_ids) // self._block_size))
        lora_request = LoRARequest("", lora_id) if lora_id else None
        row = new_row(slot, token_ids, blocks, GREEDY, lora_request=lora_request)
        self._rows.apply(StepPlan(plan_id=0, slots=[], num_scheduled_tokens=[], new_rows=[row]))

    @torch.inference_mode()
    def compute(self, counts: dict[int, int]) -> dict[int, torch.Tensor]:
        """Computes the next tokens of each slot: ``[count, vocab]`` logits."""
        slots = np.array(list(counts), dtype=np.int64)
        num_tokens = np.array(list(counts.values()), dtype=np.int64)
        self._rows.check_scheduled(slots, num_tokens)
        layout = lay_out(self._rows, slots, num_tokens)
        batch = self._builder.build(layout)
        logits = self._decoder.score(self._decoder.forward(batch, self._cache))
        self._rows.num_computed[slots] += num_tokens
        parts = logits.split_with_sizes(layout.counts.tolist())
        return dict(zip(layout.slots.tolist(), parts, strict=True))

    def run(self, slot: int, chunks: Sequence[int]) -> torch.Tensor:
        """Computes one slot's tokens chunk by chunk: ``[sum(chunks), vocab]``."""
        return torch.cat([self.compute({slot: chunk})[slot] for chunk in chunks])


class Collecting:
    """Gives a runner an executor's face."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self._in_flight: deque[StepInFlight] = deque()

    def launch(self, plan: StepPlan) -> None:
        self._in_flight.append(self.runner.launch(plan))

    def collect(self) -> StepResult:
        return self._in_flight.popleft().settle()


class RunnerExecutor(Collecting):
    """An executor of a model that is loaded already, on CPU, in either order of calls.

    Args:
        decoder: the model.
        config: limits; ``max_model_len`` and ``num_blocks`` must be set.
        launches_ahead: as a CUDA device would have it.
    """

    def __init__(self, decoder: Decoder, config: EngineConfig, *, launches_ahead: bool) -> None:
        assert config.max_model_len is not None
        assert config.num_blocks is not None
        shape = KVCacheShape.of(decoder.config, config.block_size, decoder.dtype)
        cache = KVCache(shape, config.num_blocks, CPU, decoder.dtype)
        self.launches_ahead = launches_ahead
        self._properties = ExecutorProperties(
            vocab_size=decoder.config.vocab_size,
            max_model_len=config.max_model_len,
            block_size=config.block_size,
            num_blocks=config.num_blocks,
        )
        runner = ModelRunner(
            decoder,
            cache,
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            launches_ahead=launches_ahead,
        )
        super().__init__(runner)
        self._adapters = Adapters(
            config.max_loras if config.enable_lora else 0,
            partial(runner.load_adapter, max_rank=config.max_lora_rank),
            runner.adapters.remove,
        )

    def load(self) -> ExecutorProperties:
        return self._properties

    def launch(self, plan: StepPlan) -> None:
        self._adapters.apply(plan)
        super().launch(plan)

    def command(self, command: DeviceCommand) -> Any:
        raise RequestError(f"no command {command.method!r}")

    def shutdown(self) -> None:
        pass


class PlanDriver:
    """Schedules by hand: rows get all blocks at once, plans are numbered.

    Args:
        executor: anything with ``launch`` and ``collect``.
        num_blocks: of its cache.
        block_size: tokens of a block.

    Attributes:
        results: all that were collected.
    """

    def __init__(self, executor: Any, num_blocks: int, block_size: int, seed: int = 0) -> None:
        self.results: list[StepResult] = []
        self._executor = executor
        self._block_size = block_size
        self._deck = BlockDeck(num_blocks, seed)
        self._held: dict[int, list[int]] = {}
        self._plan_id = 0
        self._changes: dict[str, Any] = {}

    def add(
        self,
        slot: int,
        token_ids: Sequence[int],
        params: SamplingParams,
        *,
        room: int,
        **fields: Any,
    ) -> None:
        """Sets up a row in the next plan, with blocks for ``room`` more tokens."""
        num_blocks = -(-(len(token_ids) + room) // self._block_size)
        self._held[slot] = self._deck.deal(num_blocks)
        row = new_row(slot, token_ids, self._held[slot], params, **fields)
        self._changes.setdefault("new_rows", []).append(row)

    def finish(self, slot: int) -> None:
        """Drops a row in the next plan."""
        self._deck.take_back(self._held.pop(slot))
        self._changes.setdefault("finished_slots", []).append(slot)

    def reset(self) -> None:
        """Drops all rows in the next plan."""
        for block_ids in self._held.values():
            self._deck.take_back(block_ids)
        self._held.clear()
        self._changes = {"reset": True}

    def launch(self, counts: dict[int, int]) -> None:
        plan = StepPlan(
            plan_id=self._plan_id,
            slots=list(counts),
            num_scheduled_tokens=list(counts.values()),
            **self._changes,
        )
        self._plan_id += 1
        self._changes = {}
        self._executor.launch(plan)

    def collect(self, counts: dict[int, int]) -> dict[int, int]:
        """The tokens that the oldest plan sampled, by slot."""
        result: StepResult = self._executor.collect()
        self.results.append(result)
        pairs = zip(counts, result.token_ids, strict=True)
        return {slot: token_id for slot, token_id in pairs if token_id != NO_TOKEN}

    def step(self, counts: dict[int, int]) -> dict[int, int]:
        self.launch(counts)
        return self.collect(counts)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        num_tokens: int,
        chunk: int = 1 << 30,
    ) -> list[list[int]]:
        """Runs requests together, prompts in chunks, each to ``num_tokens`` output tokens."""
        left = [len(prompt) for prompt in prompts]
        outputs: list[list[int]] = [[] for _ in prompts]
        for slot, prompt in enumerate(prompts):
            self.add(slot, prompt, params[slot], room=num_tokens)
        while running := [slot for slot in range(len(prompts)) if len(outputs[slot]) < num_tokens]:
            counts = {slot: min(chunk, left[slot]) or 1 for slot in running}
            for slot, token_id in self.step(counts).items():
                outputs[slot].append(token_id)
            for slot in running:
                left[slot] = max(0, left[slot] - counts[slot])
        for slot in range(len(prompts)):
            self.finish(slot)
        return outputs


def new_row(
    slot: int,
    token_ids: Sequence[int],
    block_ids: list[int],
    params: SamplingParams,
    **fields: Any,
) -> NewRow:
    values = {"num_prompt_tokens": len(token_ids), "num_computed_tokens": 0} | fields
    return NewRow(
        slot=slot,
        request_id=f"request-{slot}",
        token_ids=list(token_ids),
        block_ids=block_ids,
        sampling_params=params,
        **values,
    )
