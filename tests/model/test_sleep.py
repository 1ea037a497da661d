"""A model that sleeps gives its memory back, and goes on afterwards as if it had not slept."""

from __future__ import annotations

import shutil
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.model.tiny_models import make_hf_folder
from trio_engine.config import EngineConfig
from trio_engine.core.engine_core import EngineCore
from trio_engine.core.pause import MEMORY_TAGS, RELEASED_AT
from trio_engine.core.plan import DeviceCommand
from trio_engine.errors import ModelError, RequestError, StepError, UtilityError
from trio_engine.executor.torch_executor import TorchExecutor
from trio_engine.outputs import FinishReason
from trio_engine.requests import EngineCoreRequest, PauseMode
from trio_engine.sampling_params import SamplingParams
from trio_engine.testing.core_driver import CoreDriver

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from trio_engine.config import DeviceName
    from trio_engine.core.pause import SleepLevel
    from trio_engine.model.sleep import ModelMemory

SAMPLING = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=20),
    "seeded": SamplingParams(seed=7, max_tokens=20),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_hf_folder("llama", tmp_path / "model")[0]


class SleepingModel:
    """A core and a torch executor, driven by hand."""

    def __init__(self, folder: Path, device: DeviceName = "cpu", **options: Any) -> None:
        config = EngineConfig(
            model=str(folder),
            device=device,
            dtype="float32",
            block_size=4,
            num_blocks=128,
            max_num_seqs=4,
            **options,
        )
        self.executor = TorchExecutor(config)
        properties = self.executor.load()
        self.core = EngineCore(config, properties, num_clients=1, clock=lambda: 1.0)
        self.driver = CoreDriver(self.core, self.executor)

    @property
    def memory(self) -> ModelMemory:
        assert self.executor._memory is not None
        return self.executor._memory

    def add_all(self) -> None:
        for request_id, params in SAMPLING.items():
            self.driver.listen(0, request_id)
            source = EngineCoreRequest(
                request_id, [5, 6, 7], None, params, None, 0.0, None, None, None
            )
            self.core.add(source)

    def run_steps(self, count: int) -> None:
        for _ in range(count):
            self.driver.schedule()
            self.driver.launch()
            self.driver.collect()

    def finish(self) -> dict[str, list[int]]:
        self.driver.run_until_idle()
        logs = {request_id: self.driver.logs[(0, request_id)] for request_id in SAMPLING}
        assert {log.finish_reason for log in logs.values()} == {FinishReason.LENGTH}
        return {request_id: log.token_ids for request_id, log in logs.items()}

    def command(self, method: str, *args: Any) -> None:
        self.executor.command(DeviceCommand(command_id=0, method=method, args=args))

    def fall_asleep(self, tags: Iterable[str]) -> None:
        self.core.pause(PauseMode.KEEP)
        self.core.fall_asleep(RELEASED_AT[2])
        self.command("sleep", sorted(tags))

    def wake_up(self) -> None:
        self.command("wake_up", sorted(MEMORY_TAGS))
        self.core.pause_state.wake_up(MEMORY_TAGS)
        self.core.resume()

    def tensors(self) -> dict[str, weakref.ref[Any]]:
        decoder, cache = self.memory._decoder, self.memory._cache
        return {
            "kv_cache": weakref.ref(cache._blocks._base),  # which all views are of
            "gathered": weakref.ref(cache._gathered),
            "weights": weakref.ref(decoder._weights.layers[1].gate_up),
            "embedding": weakref.ref(decoder._weights.embedding),
        }


@pytest.mark.parametrize("level", [1, 2])
def test_kept_requests_go_on_with_the_tokens_of_a_run_without_sleep(
    folder: Path, level: SleepLevel
) -> None:
    model = SleepingModel(folder)
    model.add_all()
    without_sleep = model.finish()
    model.add_all()
    model.run_steps(9)
    model.fall_asleep(RELEASED_AT[level])
    model.wake_up()
    assert model.finish() == without_sleep
    assert without_sleep["greedy"] != without_sleep["seeded"]


@pytest.mark.parametrize(
    ("level", "released"),
    [(1, {"kv_cache", "gathered"}), (2, {"kv_cache", "gathered", "weights", "embedding"})],
)
def test_each_level_lets_go_of_its_memory_and_of_no_other(
    folder: Path, level: SleepLevel, released: set[str]
) -> None:
    model = SleepingModel(folder)
    model.add_all()
    model.run_steps(3)
    tensors = model.tensors()
    model.fall_asleep(RELEASED_AT[level])
    assert {name for name, tensor in tensors.items() if tensor() is None} == released


def test_a_gguf_or_folder_is_read_again_as_it_is_then(folder: Path, tmp_path: Path) -> None:
    """New weights of the same model take effect by a sleep of level 2."""
    model = SleepingModel(folder)
    model.add_all()
    before = model.finish()
    other = make_hf_folder("llama", tmp_path / "other", seed=1)[0]
    shutil.copytree(other, folder, dirs_exist_ok=True)
    fresh = SleepingModel(folder)
    fresh.add_all()
    model.fall_asleep(RELEASED_AT[2])
    model.wake_up()
    model.add_all()
    assert model.finish() == fresh.finish() != before


def test_a_checkpoint_that_is_gone_or_of_another_model_leaves_the_weights_asleep(
    folder: Path, tmp_path: Path
) -> None:
    model = SleepingModel(folder)
    model.add_all()
    expected = model.finish()
    model.fall_asleep(RELEASED_AT[2])
    kept = folder.rename(tmp_path / "kept")
    with pytest.raises(ModelError):
        model.command("wake_up", ["kv_cache", "weights"])
    make_hf_folder("llama", folder, intermediate_size=96)
    with pytest.raises(ModelError, match="has changed since it was loaded"):
        model.command("wake_up", ["kv_cache", "weights"])
    assert model.memory.asleep == {"kv_cache", "weights"}
    shutil.rmtree(folder)
    kept.rename(folder)
    model.wake_up()
    model.add_all()
    assert model.finish() == expected


def test_memory_that_runs_out_in_a_wake_up_fails_it_and_may_be_tried_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    model = SleepingModel(folder)
    model.fall_asleep(RELEASED_AT[2])
    with monkeypatch.context() as patch:
        patch.setattr("trio_engine.model.kv_cache._zeros", exhausted)
        with pytest.raises(UtilityError, match="out of memory while waking up kv_cache"):
            model.command("wake_up", ["kv_cache", "weights"])
    assert model.memory.asleep == {"kv_cache"}
    model.wake_up()
    model.add_all()
    model.finish()


def test_sleeping_twice_and_waking_twice_is_as_once(folder: Path) -> None:
    model = SleepingModel(folder)
    model.add_all()
    expected = model.finish()
    for _ in range(2):
        model.fall_asleep(RELEASED_AT[2])
    model.command("wake_up", ["weights"])
    for _ in range(2):
        model.wake_up()
    model.add_all()
    assert model.finish() == expected


@pytest.mark.parametrize("tag", ["weights", "kv_cache"])
def test_asleep_it_refuses_to_compute(folder: Path, tag: str) -> None:
    model = SleepingModel(folder)
    model.add_all()
    assert model.driver.schedule()
    model.command("sleep", [tag])
    with pytest.raises(StepError, match=f"plan 0, but memory sleeps: {tag}$"):
        model.driver.launch()
    with pytest.raises(RequestError, match=f"^memory sleeps: {tag}$"):
        model.command("execute_dummy_batch")
    model.command("synchronize")


def test_a_dummy_batch_changes_no_token(folder: Path) -> None:
    model = SleepingModel(folder)
    model.add_all()
    expected = model.finish()
    model.add_all()
    model.run_steps(5)
    model.command("execute_dummy_batch")
    cache = model.memory._cache
    assert not cache._blocks[:, cache.null_block].any()  # the padding of every block table
    assert model.finish() == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("cuda_graphs", [False, True])
@pytest.mark.parametrize("level", [1, 2])
def test_on_cuda_the_memory_is_there_for_others(
    folder: Path, level: SleepLevel, cuda_graphs: bool
) -> None:
    model = SleepingModel(folder, "cuda", cuda_graphs=cuda_graphs)
    model.add_all()
    expected = model.finish()
    model.add_all()
    model.run_steps(5)
    held = torch.cuda.memory_reserved()
    model.fall_asleep(RELEASED_AT[level])
    assert torch.cuda.memory_reserved() < held
    model.wake_up()
    assert model.finish() == expected
