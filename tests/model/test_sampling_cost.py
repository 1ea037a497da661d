"""What a step pays for sampling: only what its rows ask for, and only for those rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.model.decoding import CPU, new_row
from tests.model.sampling_cases import OPTIONS, params_of
from trio_engine.core.plan import StepPlan
from trio_engine.model.rows import Rows
from trio_engine.model.sampler import Sampler

if TYPE_CHECKING:
    from collections.abc import Sequence

VOCAB = 128
NUM_ROWS = 64


class CountOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes each operation of torch and how many elements its new tensor has."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {_memory_of(arg) for arg in args if isinstance(arg, torch.Tensor)}
        is_new = isinstance(result, torch.Tensor) and _memory_of(result) not in given
        self.sizes.append((func.overloadpacket.__name__, result.numel() if is_new else 0))
        return result


def _memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def count_operations(names: Sequence[str]) -> list[tuple[str, int]]:
    """Operations of one step whose rows have these options; the others are greedy."""
    rows = Rows(VOCAB, NUM_ROWS, 64, 4, 1)
    sampler = Sampler(rows, VOCAB, CPU)
    options = [params_of(name) for name in [*names, *["greedy"] * (NUM_ROWS - len(names))]]
    new_rows = [new_row(slot, [5, 6, 7], [], params) for slot, params in enumerate(options)]
    plan = StepPlan(plan_id=0, slots=[], num_scheduled_tokens=[], new_rows=new_rows)
    rows.apply(plan)
    sampler.apply(plan)
    logits = torch.randn(NUM_ROWS, VOCAB)
    counter = CountOperations()
    with torch.no_grad(), counter:
        sampler.sample(logits, np.arange(NUM_ROWS))
    return counter.sizes


def test_greedy_rows_pay_for_the_largest_logit_and_a_look_for_nan() -> None:
    reads = ("_local_scalar_dense", "is_nonzero")
    names = [name for name, _ in count_operations([]) if name not in reads]
    assert names == ["amax", "isnan", "any", "argmax"]


def test_a_row_that_asks_costs_its_neighbours_nothing() -> None:
    """Beside the pass for each of a greedy batch, nothing is as large as two rows."""
    for name in OPTIONS:
        for operation, size in count_operations([name]):
            assert size <= 2 * VOCAB, (name, operation, size)


def test_the_counter_sees_what_a_whole_batch_asks_for() -> None:
    sizes = dict(count_operations(["all penalties"] * NUM_ROWS))
    assert max(sizes.values()) >= NUM_ROWS * VOCAB
