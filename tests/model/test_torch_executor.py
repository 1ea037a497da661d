"""The torch executor: what load decides, and the executor protocol on a tiny model."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch

from tests.model.decoding import GREEDY, PlanDriver
from tests.model.tiny_models import make_hf_folder
from trio_engine.checkpoint import locate_model
from trio_engine.config import EngineConfig
from trio_engine.core.plan import DeviceCommand, StepPlan
from trio_engine.errors import ConfigError, ModelError, RequestError, StepError
from trio_engine.executor.torch_executor import TorchExecutor
from trio_engine.model.load import default_step_tokens
from trio_engine.model.loader import open_checkpoint
from trio_engine.testing.check_executor import CONFIG as CHECK_CONFIG, check_executor

if TYPE_CHECKING:
    from pathlib import Path

    from trio_engine.config import DeviceName
    from trio_engine.executor.base import ExecutorFactory


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf_folder("llama", tmp_path_factory.mktemp("llama"), tie_word_embeddings=True)[0]


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from trio_engine.config import EngineConfig
from trio_engine.errors import ModelError
from trio_engine.executor.torch_executor import TorchExecutor
try:
    TorchExecutor(EngineConfig()).load()
except ModelError as error:
    print(error)
"""


def test_without_torch_it_says_what_to_install() -> None:
    told = subprocess.check_output([sys.executable, "-c", WITHOUT_TORCH], text=True)
    assert told == "torch is not installed: pip install 'trio-engine[torch]'\n"


def make(folder: Path, **options: Any) -> TorchExecutor:
    return TorchExecutor(EngineConfig(model=str(folder), device="cpu", **options))


def test_it_is_an_executor_factory() -> None:
    factory: ExecutorFactory = TorchExecutor
    assert factory(EngineConfig()).launches_ahead is False


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_it_does_what_any_executor_must(folder: Path, device: DeviceName) -> None:
    """On CUDA it launches ahead, on CPU it does not."""
    config = msgspec.structs.replace(CHECK_CONFIG, model=str(folder), device=device)
    check_executor(TorchExecutor, config)


def test_importing_it_does_not_import_torch() -> None:
    program = (
        "import sys; import trio_engine.executor.torch_executor as m; from trio_engine.config "
        "import EngineConfig; m.TorchExecutor(EngineConfig()); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_properties_come_from_model_and_options(folder: Path) -> None:
    properties = make(folder, max_num_seqs=3).load()
    assert properties.vocab_size == 128
    assert properties.max_model_len == 256
    assert properties.block_size == 16
    assert properties.num_blocks == 3 * 256 // 16
    assert properties.dtype == "float32"
    assert properties.default_max_num_batched_tokens == 256
    properties = make(
        folder, max_model_len=100, num_blocks=9, block_size=8, dtype="bfloat16"
    ).load()
    assert properties.max_model_len == 100
    assert (properties.num_blocks, properties.block_size) == (9, 8)
    assert properties.dtype == "bfloat16"
    assert make(folder, max_model_len=5000).load().max_model_len == 256


def test_a_larger_model_gets_fewer_tokens_a_step(folder: Path) -> None:
    config = open_checkpoint(locate_model(str(folder))).config
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_layers": 24, "head_dim": 64}
    large = msgspec.structs.replace(config, num_heads=32, num_kv_heads=8, **sizes)
    assert 32 <= default_step_tokens(large, is_cpu=True) < 64
    assert default_step_tokens(config, is_cpu=True) == 256
    assert default_step_tokens(large, is_cpu=False) == 8192


def test_it_runs_plans_on_a_thread_of_its_own(folder: Path) -> None:
    outputs: list[list[int]] = []

    def forward_thread() -> None:
        executor = make(folder, max_num_seqs=4)
        properties = executor.load()
        driver = PlanDriver(executor, properties.num_blocks, properties.block_size)
        outputs.extend(driver.generate([[5, 6], [7] * 40], [GREEDY] * 2, 6))
        executor.shutdown()

    thread = threading.Thread(target=forward_thread)
    thread.start()
    thread.join()
    assert [len(output) for output in outputs] == [6, 6]


def test_progress_starts_at_zero_and_ends_at_the_total(folder: Path) -> None:
    calls: list[tuple[int, int]] = []
    config = EngineConfig(model=str(folder), device="cpu")
    executor = TorchExecutor(config, on_progress=lambda done, total: calls.append((done, total)))
    executor.load()
    total = calls[0][1]
    assert calls[0] == (0, total)
    assert calls[-1] == (total, total)
    assert calls == sorted(calls)


def test_a_plan_without_rows_changes_rows_only(folder: Path) -> None:
    executor = make(folder)
    executor.load()
    executor.launch(StepPlan(plan_id=3, slots=[], num_scheduled_tokens=[]))
    result = executor.collect()
    assert (result.plan_id, result.token_ids) == (3, [])


def test_a_reset_forgets_results_that_nobody_collected(folder: Path) -> None:
    executor = make(folder)
    executor.load()
    for plan_id, reset in ((0, False), (1, True)):
        executor.launch(StepPlan(plan_id=plan_id, slots=[], num_scheduled_tokens=[], reset=reset))
    assert executor.collect().plan_id == 1


def test_commands(folder: Path) -> None:
    executor = make(folder)
    executor.load()
    assert executor.command(DeviceCommand(command_id=1, method="synchronize")) is None
    with pytest.raises(RequestError, match="no command 'self_destruct'"):
        executor.command(DeviceCommand(command_id=2, method="self_destruct"))


def test_misuse_is_a_step_error(folder: Path) -> None:
    executor = make(folder)
    executor.shutdown()  # also after no load at all
    plan = StepPlan(plan_id=0, slots=[], num_scheduled_tokens=[])
    with pytest.raises(StepError, match="holds no model"):
        executor.launch(plan)
    executor.load()
    with pytest.raises(StepError, match="no plan is in flight"):
        executor.collect()
    executor.shutdown()
    with pytest.raises(StepError, match="holds no model"):
        executor.launch(plan)


def test_shutdown_lets_go_of_the_memory(folder: Path) -> None:
    executor = make(folder)
    executor.load()
    assert executor._runner is not None
    cache = weakref.ref(executor._runner._cache)
    executor.shutdown()
    gc.collect()
    assert cache() is None


def test_a_missing_model_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere"):
        make(tmp_path / "nowhere").load()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_a_config_error(folder: Path) -> None:
    executor = TorchExecutor(EngineConfig(model=str(folder), device="cuda"))
    with pytest.raises(ConfigError, match="device 'cuda' is not available"):
        executor.load()


def test_a_cache_that_does_not_fit_is_a_config_error(folder: Path) -> None:
    with pytest.raises(ConfigError, match="num_blocks 1000000000"):
        make(folder, num_blocks=1_000_000_000).load()


def test_memory_that_runs_out_in_load_is_a_config_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    monkeypatch.setattr("trio_engine.model.load.load_weights", exhausted)
    with pytest.raises(ConfigError, match=r"as float32: CUDA out of memory\.$"):
        make(folder).load()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_cuda_gives_the_same_greedy_tokens(folder: Path, cuda_graphs: bool) -> None:
    outputs = []
    devices: tuple[DeviceName, ...] = ("cpu", "cuda")
    for device in devices:
        config = EngineConfig(
            model=str(folder),
            device=device,
            dtype="float32",
            num_blocks=64,
            cuda_graphs=cuda_graphs and device == "cuda",
        )
        executor = TorchExecutor(config)
        properties = executor.load()
        assert executor.launches_ahead is (device == "cuda")
        driver = PlanDriver(executor, properties.num_blocks, properties.block_size)
        outputs.append(driver.generate([[5, 6], [7] * 40, [9]], [GREEDY] * 3, 24, chunk=8))
        executor.shutdown()
    assert outputs[0] == outputs[1]


def test_graphs_need_cuda(folder: Path) -> None:
    config = EngineConfig(model=str(folder), device="cpu", cuda_graphs=True)
    with pytest.raises(ConfigError, match=r"cuda_graphs need device 'cuda', not 'cpu'"):
        TorchExecutor(config).load()
