"""Two engines under the same loads, in turns, so that what else the machine does hits both.

One pair is one run of each, and its ratio is what counts: two figures that were measured one after
the other. Every other pair begins with the other engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trio_engine.bench.figures import LoadFigures, Pair
from trio_engine.bench.load import run_load

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trio_engine.bench.engine import BenchEngine
    from trio_engine.bench.load import Progress
    from trio_engine.bench.workload import Workload


async def compare_engines(
    engines: Sequence[BenchEngine],
    workload: Workload,
    num_pairs: int,
    progress_of: Callable[[str], Progress],
    on_pair: Callable[[Pair], object],
) -> None:
    """Runs a workload on two engines, after a short one to warm up.

    Args:
        engines: two, neither of which does anything else.
        workload: what to send.
        num_pairs: runs of each.
        progress_of: by what is going on, what is told of it.
        on_pair: called with each pair as soon as it is complete, so that what follows cannot
            lose it.

    Raises:
        EngineDeadError: one of them ended, or hangs.

    Cancellation: as ``run_load``.
    """
    for engine in engines:
        await run_load(engine, workload.warm_up)
    for number in range(num_pairs):
        order = (0, 1) if number % 2 == 0 else (1, 0)
        found: dict[int, LoadFigures] = {}
        for which in order:
            name = f"{workload.name}, pair {number + 1} of {num_pairs}, engine {which + 1}"
            found[which] = await run_load(engines[which], workload, progress_of(name))
        on_pair(Pair(found[0], found[1]))
