"""What options make of logits, against transformers' processors and plain loops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.model.decoding import CPU, new_row
from tests.model.sampling_cases import OPTIONS, params_of
from tests.model.sampling_oracle import edited_logits
from trio_engine.core.plan import StepPlan
from trio_engine.model.logit_edits import LogitEdits
from trio_engine.model.rows import Rows
from trio_engine.model.sampling_rows import SamplingRows
from trio_engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

VOCAB = 128
PROMPT = [9, 5, 30, 9, 64]
# The outputs so far of three rows: nothing, the beginnings of bad words, and repetition.
OUTPUTS = [[], [6, 7], [64, 7, 8, 5, 64, 64, 20, 6, 6]]


@pytest.fixture(autouse=True)
def inference_mode() -> Iterator[None]:
    with torch.inference_mode():
        yield


def random_logits(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


class Edited:
    """Rows with options, and the edits of them."""

    def __init__(self, options: Sequence[SamplingParams], outputs: Sequence[Sequence[int]]) -> None:
        num_rows = len(options)
        self.rows = Rows(VOCAB, num_rows, 64, 4, 1)
        self.options = SamplingRows(num_rows, VOCAB)
        self.edits = LogitEdits(self.options, self.rows, CPU)
        for slot in range(num_rows):
            self.set_up(slot, options[slot], outputs[slot])

    def set_up(self, slot: int, params: SamplingParams, output: Sequence[int]) -> None:
        row = new_row(slot, [*PROMPT, *output], [], params, num_prompt_tokens=len(PROMPT))
        self.rows.apply(StepPlan(plan_id=0, slots=[], num_scheduled_tokens=[], new_rows=[row]))
        self.options.drop(slot)
        self.edits.drop(slot)
        self.options.set_up(slot, params)
        self.edits.set_up(row)

    def append_unsettled(self, slots: Sequence[int], token_ids: Sequence[int]) -> torch.Tensor:
        """Each row gets a token that the host does not know; the newest tokens by slot."""
        self.edits.note(np.array(slots), torch.tensor(token_ids))
        self.rows.append_unsettled(np.array(slots))
        last_tokens = torch.full((len(self.rows.num_tokens),), -7)
        last_tokens[list(slots)] = torch.tensor(token_ids)
        return last_tokens

    def apply(
        self, logits: torch.Tensor, slots: Sequence[int], last_tokens: torch.Tensor | None = None
    ) -> torch.Tensor:
        edited = logits.clone()
        self.edits.apply(edited, np.array(slots), last_tokens)
        return edited


def expected(
    logits: torch.Tensor, options: Sequence[SamplingParams], outputs: Sequence[Sequence[int]]
) -> torch.Tensor:
    rows = [
        edited_logits(row.tolist(), PROMPT, output, params)
        for row, params, output in zip(logits, options, outputs, strict=True)
    ]
    return torch.tensor(np.array(rows), dtype=torch.float32)


def assert_equal(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_alone_edits_as_transformers_does(name: str) -> None:
    options = [params_of(name)] * 3
    logits = random_logits(3)
    edited = Edited(options, OUTPUTS).apply(logits, range(3))
    assert_equal(edited, expected(logits, options, OUTPUTS))
    if not edited.equal(logits):
        return
    changing = {"penal", "favoured", "bias", "allowed", "bad words", "min_tokens", "everything"}
    assert not any(word in name for word in changing)


@pytest.mark.parametrize("is_unsettled", [False, True])
def test_all_options_in_one_batch_in_any_order_edit_their_own_rows(is_unsettled: bool) -> None:
    options = [params_of(name) for name in OPTIONS]
    outputs = [OUTPUTS[1 + index % 2] for index in range(len(options))]
    logits = random_logits(len(options))
    order = np.random.default_rng(3).permutation(len(options)).tolist()
    last_tokens = None
    if is_unsettled:
        edited = Edited(options, [output[:-1] for output in outputs])
        slots = list(range(len(options)))
        last_tokens = edited.append_unsettled(slots, [output[-1] for output in outputs])
    else:
        edited = Edited(options, outputs)
    wanted = expected(logits, options, outputs)
    assert_equal(edited.apply(logits[order], order, last_tokens), wanted[order])
    some = order[::3]
    assert_equal(edited.apply(logits[some], some, last_tokens), wanted[some])


def test_a_token_that_the_host_has_not_heard_of_counts() -> None:
    """Rows grow by tokens that only the device knows, one at a time as in a pipeline."""
    names = ["all penalties", "repetition_penalty", "long bad words", "greedy", "bad words"]
    options = [params_of(name) for name in names]
    outputs: list[list[int]] = [[] for _ in names]
    edited = Edited(options, outputs)
    slots = np.arange(len(names))
    last_tokens = None
    for step in range(12):
        logits = random_logits(len(names), seed=step)
        found = edited.apply(logits, range(len(names)), last_tokens)
        assert_equal(found, expected(logits, options, outputs))
        token_ids = [5 + (3 * step + slot) % 4 for slot in slots.tolist()]
        last_tokens = edited.append_unsettled(range(len(names)), token_ids)
        for output, token_id in zip(outputs, token_ids, strict=True):
            output.append(token_id)
        if step % 3:  # then the host hears of it before the next step
            rows = edited.rows
            positions = rows.num_tokens[slots] - 1
            rows.settle(slots, rows.generation[slots], positions, np.array(token_ids))
        else:
            found = edited.apply(logits, range(len(names)), last_tokens)
            assert_equal(found, expected(logits, options, outputs))
            positions = edited.rows.num_tokens[slots] - 1
            generations = edited.rows.generation[slots]
            edited.rows.settle(slots, generations, positions, np.array(token_ids))


def test_a_slot_forgets_its_last_row_and_counts_anew() -> None:
    options = [params_of("all penalties"), params_of("everything")]
    edited = Edited(options, OUTPUTS[1:])
    logits = random_logits(2)
    edited.set_up(1, options[0], OUTPUTS[2])
    edited.set_up(0, params_of("greedy"), OUTPUTS[1])
    found = edited.apply(logits, [0, 1])
    assert found[0].equal(logits[0])
    assert_equal(found[1:], expected(logits[1:], [options[0]], [OUTPUTS[2]]))


def test_many_penalized_rows_come_and_go() -> None:
    """The table of counts grows and places are used again."""
    params = params_of("all penalties")
    edited = Edited([params_of("greedy")] * 9, [[]] * 9)
    outputs: dict[int, list[int]] = {}
    generator = np.random.default_rng(1)
    for _ in range(60):
        slot = int(generator.integers(9))
        if slot in outputs and generator.random() < 0.5:
            del outputs[slot]
            edited.set_up(slot, params_of("greedy"), [])
        else:
            outputs[slot] = generator.integers(VOCAB, size=4).tolist()
            edited.set_up(slot, params, outputs[slot])
        if outputs:
            logits = random_logits(len(outputs))
            wanted = expected(logits, [params] * len(outputs), list(outputs.values()))
            assert_equal(edited.apply(logits, list(outputs)), wanted)
    for slot in list(outputs):
        edited.set_up(slot, params_of("greedy"), [])
    assert edited.edits._penalties._table is None


@pytest.mark.known_fault(kind="token-out-of-range")
@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": [VOCAB, 7, -1]},
        {"logit_bias": {VOCAB: 9.0, -1: 9.0, 7: 0.0}},
        {"bad_words_token_ids": [[VOCAB], [-1], [7, VOCAB]]},
        {"stop_token_ids": [VOCAB, VOCAB + 3, -1], "min_tokens": 1},
    ],
)
def test_ids_outside_the_vocabulary_reach_no_other_row(fields: dict[str, Any]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=None, **fields)
    logits = random_logits(3)
    edited = Edited([params_of("greedy"), params, params_of("greedy")], [[]] * 3)
    found = edited.apply(logits, range(3))
    assert found[[0, 2]].equal(logits[[0, 2]])
    if "allowed_token_ids" in fields:
        assert found[1].isfinite().nonzero().tolist() == [[7]]
    else:
        assert found[1].equal(logits[1])


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1e-300},
        {"repetition_penalty": 1e300},
        {"logit_bias": {5: 1e300, 6: -1e300, 7: -np.inf}},
    ],
)
def test_extreme_values_make_no_nan(fields: dict[str, Any]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=None, **fields)
    logits = random_logits(1)
    logits[0, 5], logits[0, 9], logits[0, 30] = 0.0, -np.inf, 0.0
    assert not Edited([params], [[5, 9]]).apply(logits, [0]).isnan().any()
