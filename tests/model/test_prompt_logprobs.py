"""Log probabilities of prompts, against transformers: in chunks, ahead, and after a restart."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.model.decoding import CPU, Collecting, PlanDriver, load_decoder
from tests.model.tiny_models import make_hf_folder
from trio_engine.checkpoint import ModelFiles
from trio_engine.errors import StepError
from trio_engine.model.kv_cache import KVCache, KVCacheShape
from trio_engine.model.runner import ModelRunner
from trio_engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from trio_engine.core.plan import StepResult
    from trio_engine.model.decoder import Decoder
    from trio_engine.outputs import LogprobsTensors

BLOCK_SIZE = 4
NUM_BLOCKS = 200
VOCAB = 128
TOLERANCE = 1e-4
PROMPTS = [[7], [5, 6], list(range(3, 40)), [9] * 21, list(range(60, 125)), [100, 3, 100, 50]]
ASKED = [3, 0, 4, None, 2, -1]


class Model:
    """A tiny model, and transformers' log probabilities of it."""

    def __init__(self, decoder: Decoder, reference: Any) -> None:
        self._decoder = decoder
        self._reference = reference

    @torch.inference_mode()
    def logprobs_after(self, token_ids: Sequence[int]) -> torch.Tensor:
        """``[num_tokens, vocab]``, of what follows each token."""
        logits = self._reference(torch.tensor([list(token_ids)])).logits[0]
        logprobs: torch.Tensor = logits.double().log_softmax(-1)
        return logprobs

    def drive(self, *, launches_ahead: bool) -> PlanDriver:
        shape = KVCacheShape.of(self._decoder.config, BLOCK_SIZE, self._decoder.dtype)
        cache = KVCache(shape, NUM_BLOCKS, CPU, self._decoder.dtype)
        runner = ModelRunner(
            self._decoder, cache, max_num_seqs=8, max_model_len=128, launches_ahead=launches_ahead
        )
        return PlanDriver(Collecting(runner), NUM_BLOCKS, BLOCK_SIZE)

    def check(self, prompt: list[int], num_logprobs: int, found: LogprobsTensors) -> None:
        """Compares what is told of a prompt with transformers."""
        arrays: list[NDArray[Any]] = [tensor.to_numpy() for tensor in found[:3]]
        ids, values, ranks = arrays
        width = (VOCAB if num_logprobs == -1 else num_logprobs) + 1
        assert ids.shape == values.shape == (len(prompt) - 1, width)
        assert ranks.shape == (len(prompt) - 1,)
        if len(prompt) == 1:
            return
        truth = self.logprobs_after(prompt)[:-1]
        assert ids[:, 0].tolist() == prompt[1:]
        wanted = truth.gather(1, torch.tensor(ids.astype(np.int64)))
        np.testing.assert_allclose(values, wanted, rtol=0, atol=TOLERANCE)
        best = truth.topk(width - 1).values
        np.testing.assert_allclose(values[:, 1:], best, rtol=0, atol=TOLERANCE)
        # Where another token is as likely within the tolerance, either rank is right.
        surely, at_most = ((truth >= wanted[:, :1] + e).sum(-1) for e in (TOLERANCE, -TOLERANCE))
        assert (surely < torch.tensor(ranks)).all()
        assert (torch.tensor(ranks) <= at_most).all()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder, reference = make_hf_folder("llama", tmp_path_factory.mktemp("llama"))
    return Model(load_decoder(ModelFiles("folder", folder)), reference)


def params(num_logprobs: int | None, **fields: Any) -> SamplingParams:
    values = {"temperature": 0.0, "max_tokens": None, "prompt_logprobs": num_logprobs}
    return SamplingParams(**{**values, **fields})


def told(results: Sequence[StepResult]) -> dict[int, list[LogprobsTensors]]:
    """By slot, what the results say of prompts."""
    found: dict[int, list[LogprobsTensors]] = {}
    for result in results:
        for slot, tensors in (result.prompt_logprobs or {}).items():
            found.setdefault(slot, []).append(tensors)
    return found


@pytest.mark.parametrize("launches_ahead", [False, True], ids=["settled", "ahead"])
@pytest.mark.parametrize("chunk", [1 << 30, 7, 1])
def test_prompts_are_told_once_and_whole_in_any_chunks(
    model: Model, chunk: int, launches_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trio_engine.model.prompt_logprobs.SLICE_TOKENS", 8)
    driver = model.drive(launches_ahead=launches_ahead)
    tokens = driver.generate(PROMPTS, [params(num) for num in ASKED], 3, chunk)
    found = told(driver.results)
    assert found.keys() == {slot for slot, num in enumerate(ASKED) if num is not None}
    for slot, tensors in found.items():
        model.check(PROMPTS[slot], ASKED[slot] or 0 if ASKED[slot] != -1 else -1, *tensors)
    plain = model.drive(launches_ahead=launches_ahead)
    assert plain.generate(PROMPTS, [params(None)] * 6, 3, chunk) == tokens


def test_they_come_with_the_first_token(model: Model) -> None:
    driver = model.drive(launches_ahead=False)
    driver.add(2, PROMPTS[2], params(1), room=4)
    tokens = [driver.step({2: count}) for count in (36, 1, 1)]
    assert [bool(token) for token in tokens] == [False, True, True]
    assert [result.prompt_logprobs is not None for result in driver.results] == [False, True, False]


def test_a_pipelined_prompt_is_told_whole(model: Model) -> None:
    """Chunks and tokens launched before the host has heard of anything."""
    driver = model.drive(launches_ahead=True)
    for slot in (2, 4):
        driver.add(slot, PROMPTS[slot], params(ASKED[slot]), room=10)
    plans = [{2: 20, 4: 10}, {4: 40, 2: 17}, {2: 1, 4: 15}, {2: 1, 4: 1}, {4: 1}]
    driver.launch(plans[0])
    for earlier, plan in pairwise(plans):
        driver.launch(plan)
        driver.collect(earlier)
    driver.collect(plans[-1])
    found = told(driver.results)
    assert {slot: len(tensors) for slot, tensors in found.items()} == {2: 1, 4: 1}
    for slot, tensors in found.items():
        model.check(PROMPTS[slot], ASKED[slot] or 0, *tensors)


@pytest.mark.parametrize("launches_ahead", [False, True], ids=["settled", "ahead"])
@pytest.mark.parametrize("how", ["finish", "reset", "set up again"])
def test_a_prompt_begun_anew_has_nothing_of_its_first_run(
    model: Model, how: str, launches_ahead: bool
) -> None:
    driver = model.drive(launches_ahead=launches_ahead)
    driver.add(1, PROMPTS[4], params(3), room=4)
    driver.step({1: 30})
    if how == "finish":
        driver.finish(1)
    elif how == "reset":
        driver.reset()
    driver.add(1, PROMPTS[2], params(2), room=4)
    for count in (30, 7, 1):
        driver.step({1: count})
    ((tensors,),) = told(driver.results).values()
    model.check(PROMPTS[2], 2, tensors)


def test_a_slot_s_next_row_does_not_take_what_is_in_flight(model: Model) -> None:
    driver = model.drive(launches_ahead=True)
    driver.add(0, PROMPTS[2], params(2), room=4)
    driver.launch({0: 37})
    driver.finish(0)
    driver.add(0, PROMPTS[4], params(1), room=4)
    driver.launch({0: 64})
    driver.collect({0: 37})
    driver.collect({0: 64})
    driver.step({0: 1})
    first, second = told(driver.results)[0]
    model.check(PROMPTS[2], 2, first)
    model.check(PROMPTS[4], 1, second)


def test_a_row_with_output_has_had_them(model: Model) -> None:
    driver = model.drive(launches_ahead=False)
    row = [*PROMPTS[2], 50, 51]
    driver.add(0, row, params(2), room=4, num_prompt_tokens=len(PROMPTS[2]))
    driver.step({0: len(row)})
    assert told(driver.results) == {}


def test_a_row_that_skips_a_part_of_its_prompt_is_a_step_error(model: Model) -> None:
    driver = model.drive(launches_ahead=False)
    driver.add(0, PROMPTS[2], params(2), room=4, num_computed_tokens=8)
    with pytest.raises(StepError, match="request-0 cannot tell its prompt's logprobs"):
        driver.step({0: 29})


@pytest.mark.parametrize("launches_ahead", [False, True], ids=["settled", "ahead"])
def test_rows_of_tokens_are_those_of_transformers(model: Model, launches_ahead: bool) -> None:
    """With options, in one batch: raw after each prefix of what was generated."""
    options = [
        params(None, logprobs=2, seed=1, temperature=1.0),
        params(None, logprobs=0, presence_penalty=2.0),
        params(None, logprobs=-1, allowed_token_ids=[4, 5]),
        params(None),
        params(2, logprob_token_ids=[7, 127, 7], seed=2, temperature=1.5),
        params(0, logprobs=3, repetition_penalty=1.5),
    ]
    driver = model.drive(launches_ahead=launches_ahead)
    outputs = driver.generate(PROMPTS, options, 6, chunk=16)
    for slot, (prompt, output, option) in enumerate(zip(PROMPTS, outputs, options, strict=True)):
        rows = [r.logprobs[slot] for r in driver.results if r.logprobs and slot in r.logprobs]
        if option.num_logprobs is None:
            assert rows == []
            continue
        truth = model.logprobs_after(prompt + output)[len(prompt) - 1 : -1]
        assert [int(row.logprob_token_ids[0, 0]) for row in rows] == output
        for place, row in enumerate(rows):
            ids, values = row.logprob_token_ids[0].tolist(), row.logprobs[0]
            np.testing.assert_allclose(values, truth[place, ids], rtol=0, atol=TOLERANCE)
            if option.logprob_token_ids:
                assert ids[1:] == option.logprob_token_ids
            else:
                best = truth[place].topk(len(ids) - 1).values
                np.testing.assert_allclose(values[1:], best, rtol=0, atol=TOLERANCE)
