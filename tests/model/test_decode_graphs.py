"""Recorded decode steps: what they give, which sizes come up, and what they leave alone.

Recorded eagerly: all but the capture itself is the same as on CUDA.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.model.decoding import CPU, GREEDY, Collecting, PlanDriver, load_decoder
from tests.model.test_decoder_logits import VARIANTS
from tests.model.tiny_models import make_hf_folder
from trio_engine.checkpoint import ModelFiles
from trio_engine.model.decode_graphs import Recording, record_eagerly
from trio_engine.model.kv_cache import KVCache, KVCacheShape
from trio_engine.model.runner import ModelRunner
from trio_engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch

    from trio_engine.model.decoder import Decoder

BLOCK_SIZE = 4
NUM_BLOCKS = 200
PROMPTS = [[5, 6, 7], list(range(3, 40)), [9] * 21, [100, 3, 100], list(range(60, 125))]
SEEDED = [SamplingParams(seed=seed, max_tokens=None) for seed in range(5)]
ATTENTIONS = ["llama", "mistral-window", "qwen2-half-sliding", "qwen3"]


class Recorder:
    """Counts what it records."""

    def __init__(self) -> None:
        self.num_recorded = 0

    def __call__(self, function: Callable[[], torch.Tensor]) -> Recording:
        self.num_recorded += 1
        return record_eagerly(function)


class Model:
    """A runner that records, or not."""

    def __init__(self, decoder: Decoder, record: Recorder | None, *, ahead: bool = False) -> None:
        shape = KVCacheShape.of(decoder.config, BLOCK_SIZE, decoder.dtype)
        self.cache = KVCache(shape, NUM_BLOCKS, CPU, decoder.dtype)
        self.runner = ModelRunner(
            decoder,
            self.cache,
            max_num_seqs=8,
            max_model_len=128,
            launches_ahead=ahead,
            record=record,
        )
        self.driver = PlanDriver(Collecting(self.runner), NUM_BLOCKS, BLOCK_SIZE)


@pytest.fixture(params=ATTENTIONS)
def decoder(request: pytest.FixtureRequest, tmp_path: Path) -> Decoder:
    family, overrides = VARIANTS[request.param]
    folder, _ = make_hf_folder(family, tmp_path, **overrides)
    return load_decoder(ModelFiles("folder", folder))


@pytest.fixture
def llama(tmp_path: Path) -> Decoder:
    return load_decoder(ModelFiles("folder", make_hf_folder("llama", tmp_path)[0]))


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("params", [[GREEDY] * 5, SEEDED])
def test_tokens_are_those_of_steps_that_are_not_recorded(
    decoder: Decoder, params: list[SamplingParams], ahead: bool
) -> None:
    recorder = Recorder()
    found = Model(decoder, recorder, ahead=ahead).driver.generate(PROMPTS, params, 30, chunk=16)
    expected = Model(decoder, None).driver.generate(PROMPTS, params, 30)
    assert found == expected
    assert recorder.num_recorded > 1


def test_a_size_is_recorded_once_and_a_longer_row_or_another_row_is_a_new_size(
    llama: Decoder,
) -> None:
    recorder = Recorder()
    driver = Model(llama, recorder).driver
    for slot in range(3):
        driver.add(slot, [5, 6, 7], GREEDY, room=100)
    driver.step({0: 3, 1: 3, 2: 3})
    assert recorder.num_recorded == 0  # prompts are not
    counts = []
    for step in range(1, 70):
        driver.step({0: 1} if step > 40 else {0: 1, 1: 1, 2: 1})
        counts.append(recorder.num_recorded)
    # Rows padded to 4 while they have up to 8 blocks of 4, then up to 16; then a row alone, up to
    # 64 tokens and beyond.
    assert counts == [1] * 29 + [2] * 11 + [3] * 21 + [4] * 8


def test_rows_that_only_pad_write_where_nobody_reads(llama: Decoder) -> None:
    model = Model(llama, Recorder())
    model.driver.generate(PROMPTS[:3], [GREEDY] * 3, 20)
    assert model.cache._blocks[:, model.cache.scratch_block].any()
    assert not model.cache._blocks[:, model.cache.null_block].any()


def test_what_is_too_large_or_mixed_is_not_recorded(
    llama: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    driver = Model(llama, recorder).driver
    driver.add(0, [5] * 8, GREEDY, room=20)
    driver.add(1, [6], GREEDY, room=20)
    driver.step({0: 4, 1: 1})
    driver.step({0: 4, 1: 1})
    assert recorder.num_recorded == 0
    row_bytes = 8 * KVCacheShape.of(llama.config, BLOCK_SIZE, llama.dtype).layer_block_bytes
    monkeypatch.setattr("trio_engine.model.attention_layout._CPU_GATHER_BYTES", 2 * row_bytes)
    model = Model(llama, recorder)
    expected = Model(llama, None).driver.generate(PROMPTS[:4], [GREEDY] * 4, 10)
    assert model.driver.generate(PROMPTS[:4], [GREEDY] * 4, 10) == expected
    assert recorder.num_recorded == 0
    expected = Model(llama, None).driver.generate([[5], [6]], [GREEDY] * 2, 10)
    assert model.driver.generate([[5], [6]], [GREEDY] * 2, 10) == expected
    assert recorder.num_recorded == 1


def test_a_larger_step_in_between_leaves_a_graph_its_memory(llama: Decoder) -> None:
    model = Model(llama, Recorder())
    short = model.driver.generate([[5, 6, 7]], [GREEDY], 10)
    model.driver.generate(PROMPTS, [GREEDY] * 5, 20)
    assert model.driver.generate([[5, 6, 7]], [GREEDY], 10) == short


def test_after_forgetting_all_is_recorded_anew_on_new_memory(llama: Decoder) -> None:
    recorder = Recorder()
    model = Model(llama, recorder)
    expected = model.driver.generate([[5, 6, 7]], [GREEDY], 10)
    model.runner.forget_graphs()
    model.cache.release()
    model.cache.allocate()
    assert model.driver.generate([[5, 6, 7]], [GREEDY], 10) == expected
    assert recorder.num_recorded == 2
