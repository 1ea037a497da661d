"""Steps in which every row decodes, recorded once for each size and then replayed.

Layer: model. On CUDA such a step is some hundred kernels, and to launch them one by one takes the
host longer than they take the device. A graph launches them at once, but always on the same memory:
so a batch is padded to one of a few sizes, and copied to where the graph of its size reads.

Counterpart: ``vllm/v1/cudagraph_dispatcher.py``.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

import torch

from trio_engine.model.attention import AttentionView

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from trio_engine.model.batch import Batch, StepLayout
    from trio_engine.model.decoder import Decoder
    from trio_engine.model.kv_cache import KVCache
    from trio_engine.model.rows import Rows

logger = logging.getLogger(__name__)

# Blocks of a row in the smallest graph, so that a short row does not soon need another: with the
# usual 16 tokens of a block a row of 128 is gathered, of which a layer reads a few hundred KB.
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


class Recorder(Protocol):
    """Records functions on a device."""

    def record(self, function: Callable[[], Tensor]) -> Recording:
        """Records a function, which is called at least once and must do the same each time.

        Raises:
            RuntimeError: it cannot be recorded, or memory ran out.
        """
        ...

    def forget(self) -> None:
        """Called when nothing that was recorded is used any more."""
        ...


class DecodeGraphs:
    """Runs padded batches of a decoder by graphs, which are recorded as sizes come up.

    Sizes are powers of two. A step that fits in none, or whose size could not be recorded, is
    computed as any other. Whoever frees the weights or the KV cache must call ``forget``.

    Args:
        decoder: the model.
        cache: its KV cache.
        rows: the persistent rows.
        gather_bytes: of KV that one step may gather in a layer; larger steps are not recorded.
        recorder: of the device.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        rows: Rows,
        *,
        gather_bytes: int,
        recorder: Recorder,
    ) -> None:
        self._decoder = decoder
        self._cache = cache
        self._rows = rows
        self._most_blocks = gather_bytes // cache.shape.layer_block_bytes
        self._recorder = recorder
        self._graphs: dict[GraphSize, _Graph | None] = {}
        # A row beyond the window would gather in every sliding layer what that does not look at.
        config = decoder.config
        self._window = config.sliding_window if any(config.layer_is_sliding) else None

    def size_of(self, layout: StepLayout) -> GraphSize | None:
        """The size that a step has to be padded to; None if it cannot be run by a graph."""
        if (layout.counts != 1).any() or self._rows.lora_ids[layout.slots].any():
            return None
        num_tokens = int(self._rows.num_computed[layout.slots].max()) + 1
        if self._window is not None and num_tokens > self._window:
            return None
        num_blocks = -(-num_tokens // self._cache.shape.block_size)
        table_width = self._rows.block_tables.shape[1]
        num_blocks = min(table_width, max(_LEAST_BLOCKS, _power_of_two(num_blocks)))
        size = GraphSize(_power_of_two(layout.slots.size), num_blocks)
        has_failed = size in self._graphs and self._graphs[size] is None
        fits = size.num_rows * size.num_blocks <= self._most_blocks
        return size if fits and not has_failed else None

    def forward(self, batch: Batch, size: GraphSize) -> Tensor:
        """``Decoder.forward`` of a batch that is padded to ``size``.

        Returns:
            ``[size.num_rows, hidden]``, to be read by what is launched before the next call only.
        """
        graph = self._graphs.get(size)
        if graph is None:
            graph = self._graphs[size] = self._new_graph(batch, size)
        if graph is None:
            return self._decoder.forward(batch, self._cache)
        return graph.run(batch)

    def forget(self) -> None:
        """Drops all graphs: they would read memory that is given back."""
        self._graphs.clear()
        self._recorder.forget()

    def _new_graph(self, batch: Batch, size: GraphSize) -> _Graph | None:
        inputs = _copy_of(batch)
        try:
            # Once as large as any graph needs it. It is the graph's for good: what the cache has
            # may grow for a step that is not recorded, and the old one would be freed.
            scratch = self._cache.reserve_gather(self._most_blocks)
            recording = self._recorder.record(lambda: self._decoder.forward(inputs, self._cache))
        except RuntimeError as error:  # torch's out of memory is one too
            logger.warning("step_not_recorded size=%s reason='%s'", tuple(size), error)
            return None
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
        return self._recording.out


class CudaRecorder:
    """Records CUDA graphs, which share their memory: only one of them runs at a time.

    One for each thread that computes. To record stops the device for a moment.
    """

    # CUDA allows one capture at a time in a process, in which there may be several engines.
    _capturing: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        # Its own, and the same for the first run and the capture: libraries keep a workspace for
        # each stream, which must be allocated before the capture and be nobody else's.
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, function: Callable[[], Tensor]) -> Recording:
        """Runs a function once, and then records it."""
        stream, graph = self._stream, torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function()
        torch.cuda.current_stream().wait_stream(stream)
        with (
            self._capturing,
            # What other threads call meanwhile does not end the capture.
            torch.cuda.graph(graph, self._pool, stream, capture_error_mode="thread_local"),
        ):
            out = function()
        return Recording(graph.replay, out)

    def forget(self) -> None:
        """Leaves the pool of the graphs that are gone, so that its memory can be given back."""
        self._pool = torch.cuda.graph_pool_handle()


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
