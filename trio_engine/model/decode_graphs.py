"""Steps in which every row decodes, recorded once for each size and then replayed.

Layer: model. On CUDA such a step is some hundred kernels, and to launch them one by one takes the
host longer than they take the device. A graph launches them at once, but always on the same memory:
so a batch is padded to one of a few sizes, and copied to where the graph of its size reads.

Counterpart: ``vllm/v1/cudagraph_dispatcher.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from trio_engine.model.attention import AttentionView

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from trio_engine.model.batch import Batch, StepLayout
    from trio_engine.model.decoder import Decoder
    from trio_engine.model.kv_cache import KVCache
    from trio_engine.model.rows import Rows

# Blocks of a row in the smallest graph. Fewer would gain little: that many are read in no time.
_LEAST_BLOCKS = 8


class GraphSize(NamedTuple):
    """Rows of a step, and KV blocks of each, padding included."""

    num_rows: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Recording:
    """A function that was recorded: ``replay`` does it again, on the same memory, into ``out``."""

    replay: Callable[[], object]
    out: Tensor


class DecodeGraphs:
    """Runs padded batches of a decoder by graphs, which are recorded as sizes come up.

    Sizes are powers of two, so that there are few; a step that does not fit in any is computed as
    any other. Whoever frees the weights or the KV cache must call ``forget``.

    Args:
        decoder: the model.
        cache: its KV cache.
        rows: the persistent rows.
        gather_bytes: of KV that one step may gather in a layer; larger steps are not recorded.
        record: records a function; ``cuda_recorder``, or ``record_eagerly`` without such a device.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        rows: Rows,
        *,
        gather_bytes: int,
        record: Callable[[Callable[[], Tensor]], Recording],
    ) -> None:
        self._decoder = decoder
        self._cache = cache
        self._rows = rows
        self._most_blocks = gather_bytes // cache.shape.layer_block_bytes
        self._record = record
        self._graphs: dict[GraphSize, _Graph] = {}

    def size_of(self, layout: StepLayout) -> GraphSize | None:
        """The size that a step has to be padded to; None if it cannot be run by a graph."""
        if (layout.counts != 1).any() or self._rows.lora_ids[layout.slots].any():
            return None
        num_tokens = int(self._rows.num_computed[layout.slots].max()) + 1
        num_blocks = -(-num_tokens // self._cache.shape.block_size)
        size = GraphSize(
            _power_of_two(layout.slots.size), max(_LEAST_BLOCKS, _power_of_two(num_blocks))
        )
        return size if size.num_rows * size.num_blocks <= self._most_blocks else None

    def forward(self, batch: Batch, size: GraphSize) -> Tensor:
        """``Decoder.forward`` of a batch that is padded to ``size``."""
        graph = self._graphs.get(size)
        if graph is None:
            graph = self._graphs[size] = self._new_graph(batch, size)
        return graph.run(batch)

    def forget(self) -> None:
        """Drops all graphs: they would read memory that is given back."""
        self._graphs.clear()

    def _new_graph(self, batch: Batch, size: GraphSize) -> _Graph:
        # Of the graph for good: what the cache has may grow, and the old one would be freed.
        scratch = self._cache.reserve_gather(size.num_rows * size.num_blocks)
        inputs = _copy_of(batch)
        recording = self._record(lambda: self._decoder.forward(inputs, self._cache))
        return _Graph(inputs, recording, scratch)


class _Graph:
    """A recorded forward pass.

    Args:
        inputs: the batch that it reads.
        recording: of the pass.
        scratch: other memory that it writes to, to be kept.
    """

    def __init__(self, inputs: Batch, recording: Recording, scratch: Tensor) -> None:
        self._inputs = list(_tensors_of(inputs))
        self._recording = recording
        self._scratch = scratch

    def run(self, batch: Batch) -> Tensor:
        for target, source in zip(self._inputs, _tensors_of(batch), strict=True):
            target.copy_(source, non_blocking=True)
        self._recording.replay()
        # The next replay, of any graph, may write there.
        return self._recording.out.clone()


def record_eagerly(function: Callable[[], Tensor]) -> Recording:
    """Records nothing: a replay calls the function. For devices without graphs."""
    out = function()
    return Recording(lambda: out.copy_(function()), out)


def cuda_recorder() -> Callable[[Callable[[], Tensor]], Recording]:
    """Records CUDA graphs, which share their memory: only one of them runs at a time."""
    pool = torch.cuda.graph_pool_handle()

    def record(function: Callable[[], Tensor]) -> Recording:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function()  # libraries allocate in a first run what they must not in a capture
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Only what this thread does is looked at: other threads of a service may use CUDA too.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            out = function()
        return Recording(graph.replay, out)

    return record


def _copy_of(batch: Batch) -> Batch:
    full = _copy_of_view(batch.full)
    return replace(
        batch,
        token_ids=batch.token_ids.clone(),
        positions=batch.positions.clone(),
        slots=batch.slots.clone(),
        full=full,
        sliding=full if batch.sliding is batch.full else _copy_of_view(batch.sliding),
    )


def _copy_of_view(view: AttentionView) -> AttentionView:
    (group,) = view.decodes
    assert group.mask is not None
    copy = replace(group, block_ids=group.block_ids.clone(), mask=group.mask.clone())
    return AttentionView((copy,), ())


def _tensors_of(batch: Batch) -> Iterator[Tensor]:
    """All that a padded batch consists of, in an order of its own."""
    yield from (batch.token_ids, batch.positions, batch.slots)
    for view in (batch.full,) if batch.sliding is batch.full else (batch.full, batch.sliding):
        (group,) = view.decodes
        assert group.mask is not None
        yield from (group.block_ids, group.mask)


def _power_of_two(number: int) -> int:
    """The least one that is not below ``number``."""
    return 1 << (number - 1).bit_length()
