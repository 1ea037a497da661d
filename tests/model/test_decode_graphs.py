"""Recorded decode steps: what they give, which sizes come up, and what they leave alone.

Recorded on a tape, which does on CPU what a graph does on CUDA.
"""

from __future__ import annotations

import weakref
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.model.decoding import CPU, GREEDY, Collecting, PlanDriver, load_decoder
from tests.model.tape_recorder import TapeRecorder
from tests.model.test_lora import load, save_adapter, tiny_decoder
from tests.model.test_sleep import SleepingModel
from tests.model.tiny_models import make_hf_folder
from trio_engine.checkpoint import ModelFiles
from trio_engine.core.pause import RELEASED_AT
from trio_engine.model.decode_graphs import DecodeGraphs
from trio_engine.model.kv_cache import KVCache, KVCacheShape
from trio_engine.model.runner import ModelRunner
from trio_engine.requests import LoRARequest
from trio_engine.sampling_params import SamplingParams
from trio_engine.tensors import TensorData

if TYPE_CHECKING:
    from pathlib import Path

    from trio_engine.model.decoder import Decoder

BLOCK_SIZE = 4
NUM_BLOCKS = 200
PROMPTS = [[5, 6, 7], list(range(3, 40)), [9] * 21, [100, 3, 100], list(range(60, 125))]
SEEDED = [SamplingParams(seed=seed, max_tokens=None) for seed in range(5)]
# With a window that the longest row outgrows on the way.
HALF_SLIDING = {"use_sliding_window": True, "sliding_window": 80, "max_window_layers": 1}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 80},
    "qwen2": HALF_SLIDING,
    "qwen3": {"tie_word_embeddings": True},
}


class Model:
    """A runner that records, or not."""

    def __init__(
        self, decoder: Decoder, recorder: TapeRecorder | None, *, ahead: bool = False
    ) -> None:
        shape = KVCacheShape.of(decoder.config, BLOCK_SIZE, decoder.dtype)
        self.cache = KVCache(shape, NUM_BLOCKS, CPU, decoder.dtype)
        self.runner = ModelRunner(
            decoder,
            self.cache,
            max_num_seqs=8,
            max_model_len=128,
            launches_ahead=ahead,
            recorder=recorder,
        )
        self.driver = PlanDriver(Collecting(self.runner), NUM_BLOCKS, BLOCK_SIZE)


@pytest.fixture(params=MODELS)
def decoder(request: pytest.FixtureRequest, tmp_path: Path) -> Decoder:
    folder, _ = make_hf_folder(request.param, tmp_path, **MODELS[request.param])
    return load_decoder(ModelFiles("folder", folder))


@pytest.fixture
def llama(tmp_path: Path) -> Decoder:
    return load_decoder(ModelFiles("folder", make_hf_folder("llama", tmp_path)[0]))


@pytest.mark.parametrize("params", [[GREEDY] * 5, SEEDED])
def test_tokens_are_those_of_steps_that_are_not_recorded(
    decoder: Decoder, params: list[SamplingParams]
) -> None:
    recorder = TapeRecorder()
    found = Model(decoder, recorder).driver.generate(PROMPTS, params, 30, chunk=16)
    expected = Model(decoder, None).driver.generate(PROMPTS, params, 30)
    assert found == expected
    assert recorder.num_recorded > 0


def generate_ahead(model: Model, num_steps: int) -> list[list[int]]:
    """Two plans in flight, so that the host does not know the token that a row goes on with."""
    outputs: list[list[int]] = [[] for _ in PROMPTS]
    for slot, prompt in enumerate(PROMPTS):
        model.driver.add(slot, prompt, SEEDED[slot], room=num_steps + 2)
    plans = [{slot: len(prompt) for slot, prompt in enumerate(PROMPTS)}]
    plans += [{0: 1} if step % 7 == 0 else dict.fromkeys(range(5), 1) for step in range(num_steps)]
    model.driver.launch(plans[0])
    for earlier, plan in pairwise([*plans, {}]):
        if plan:
            model.driver.launch(plan)
        for slot, token_id in model.driver.collect(earlier).items():
            outputs[slot].append(token_id)
    return outputs


def test_a_graph_takes_the_token_that_nobody_has_seen(decoder: Decoder) -> None:
    recorder = TapeRecorder()
    found = generate_ahead(Model(decoder, recorder, ahead=True), 14)
    assert found == generate_ahead(Model(decoder, None, ahead=True), 14)
    assert recorder.num_recorded > 0


def test_prompt_logprobs_are_not_changed_by_later_replays(llama: Decoder) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=None, prompt_logprobs=2)
    told = []
    for recorder in (TapeRecorder(), None):
        driver = Model(llama, recorder).driver
        driver.generate([[5, 6, 7, 8]], [params], 6, chunk=1)  # each chunk decodes, to look at
        (scores,) = [r.prompt_logprobs for r in driver.results if r.prompt_logprobs]
        told.append([tensor.to_numpy() for tensor in scores[0][:3]])
    for found, expected in zip(*told, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_size_is_recorded_once_and_a_longer_row_or_another_row_is_a_new_size(
    llama: Decoder,
) -> None:
    recorder = TapeRecorder()
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
    model = Model(llama, TapeRecorder())
    model.driver.generate(PROMPTS[:3], [GREEDY] * 3, 20)
    assert model.cache._blocks[:, model.cache.scratch_block].any()
    assert not model.cache._blocks[:, model.cache.null_block].any()


def test_what_is_too_large_or_mixed_is_not_recorded(
    llama: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = TapeRecorder()
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


def test_a_larger_step_in_between_leaves_a_graph_its_memory(
    llama: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    row_bytes = 8 * KVCacheShape.of(llama.config, BLOCK_SIZE, llama.dtype).layer_block_bytes
    monkeypatch.setattr("trio_engine.model.attention_layout._CPU_GATHER_BYTES", row_bytes)
    model = Model(llama, TapeRecorder())
    short = model.driver.generate([[5, 6, 7]], [GREEDY], 10)
    gathered = weakref.ref(model.cache._gathered)
    model.driver.generate([PROMPTS[4]], [GREEDY], 20)
    assert gathered() is not model.cache._gathered
    assert gathered() is not None  # a graph still writes there
    assert model.driver.generate([[5, 6, 7]], [GREEDY], 10) == short


def test_a_size_that_cannot_be_recorded_is_tried_once_and_computed_as_before(
    llama: Decoder, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = TapeRecorder(fails=True)
    found = Model(llama, recorder).driver.generate(PROMPTS[:2], [GREEDY] * 2, 12)
    assert found == Model(llama, None).driver.generate(PROMPTS[:2], [GREEDY] * 2, 12)
    sizes = ["(2, 16)", "(2, 8)"]
    told = [record.getMessage() for record in caplog.records]
    assert recorder.num_recorded == len(told) <= len(sizes)
    assert told[0] == "step_not_recorded size=(2, 16) reason='CUDA out of memory'"


def test_after_forgetting_all_is_recorded_anew_on_new_memory(llama: Decoder) -> None:
    recorder = TapeRecorder()
    model = Model(llama, recorder)
    expected = model.driver.generate([[5, 6, 7]], [GREEDY], 10)
    model.runner.forget_graphs()
    model.cache.release()
    model.cache.allocate()
    assert model.driver.generate([[5, 6, 7]], [GREEDY], 10) == expected
    assert (recorder.num_recorded, recorder.num_forgotten) == (2, 1)


def test_a_sleep_forgets_them(tmp_path: Path) -> None:
    model = SleepingModel(make_hf_folder("llama", tmp_path)[0])
    assert model.executor._runner is not None
    recorder = TapeRecorder()
    model.executor._runner._graphs = DecodeGraphs(
        model.memory._decoder,
        model.memory._cache,
        model.executor._runner._rows,
        gather_bytes=1 << 20,
        recorder=recorder,
    )
    model.add_all()
    expected = model.finish()
    num_recorded = recorder.num_recorded
    assert num_recorded > 0
    model.fall_asleep(RELEASED_AT[2])
    assert recorder.num_forgotten == 1
    model.wake_up()
    model.add_all()
    assert model.finish() == expected
    assert recorder.num_recorded == 2 * num_recorded


def test_rows_with_an_adapter_are_not_recorded(tmp_path: Path) -> None:
    llama = tiny_decoder("llama", tmp_path / "model")
    save_adapter(tmp_path / "adapter", "llama")
    outputs = []
    recorder = TapeRecorder()
    for some in (recorder, None):
        model = Model(llama, some)
        model.runner.adapters.add(load(tmp_path / "adapter", llama))
        model.driver.add(0, PROMPTS[0], GREEDY, room=10, lora_request=LoRARequest("a", 1))
        model.driver.step({0: 3})
        outputs.append([model.driver.step({0: 1}) for _ in range(9)])
    assert outputs[0] == outputs[1]
    assert recorder.num_recorded == 0


def test_a_prompt_of_embeddings_is_not_recorded_token_by_token(llama: Decoder) -> None:
    embeds = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    outputs = []
    recorder = TapeRecorder()
    for some in (recorder, None):
        driver = Model(llama, some).driver
        driver.add(0, [0] * 8, GREEDY, room=10, prompt_embeds=TensorData.from_numpy(embeds.numpy()))
        tokens = [driver.step({0: 1}) for _ in range(8)]
        outputs.append(tokens)
    assert outputs[0] == outputs[1]
    assert recorder.num_recorded == 0
