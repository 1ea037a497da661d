"""Which form a model's matrices get: named, measured, or the plain one where no other works."""

from __future__ import annotations

import itertools
import re
import time
import types
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.model.decoding import CPU, LogitsProbe, load_decoder
from tests.model.test_decoder_logits import assert_close, reference, token_ids
from tests.model.test_linear import NEEDS_MKL
from tests.model.test_quantization import matrices_of
from tests.model.test_sleep import SleepingModel
from tests.model.tiny_models import make_hf_folder
from trio_engine.checkpoint import ModelFiles
from trio_engine.config import EngineConfig
from trio_engine.core.pause import MEMORY_TAGS, RELEASED_AT
from trio_engine.errors import ConfigError, UtilityError
from trio_engine.executor.torch_executor import TorchExecutor
from trio_engine.model.linear import PackedMatrix, SwappedMatrix, can_pack
from trio_engine.model.linear_backend import _fastest, choose_linear_backend
from trio_engine.model.loader import open_checkpoint
from trio_engine.model.matrix import StoredMatrix
from trio_engine.model.weights import WeightForm

if TYPE_CHECKING:
    from pathlib import Path

    from trio_engine.config import LinearBackendName

NAMED: list[Any] = ["torch", "swapped", pytest.param("mkl", marks=NEEDS_MKL)]
FORMS = {"torch": torch.Tensor, "swapped": SwappedMatrix, "mkl": PackedMatrix}
WIDE = {"hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 8, "vocab_size": 768}


@pytest.fixture
def wide(tmp_path: Path) -> tuple[ModelFiles, Any]:
    """A model whose matrices are just large enough, and transformers' own of it."""
    folder, model = make_hf_folder("llama", tmp_path, tie_word_embeddings=True, **WIDE)
    return ModelFiles("folder", folder), model


@pytest.mark.parametrize("chunks", [[70], [1, 2, 3, 8, 56]])
@pytest.mark.parametrize("name", NAMED)
def test_a_model_computes_the_same_with_each(
    name: LinearBackendName, chunks: list[int], wide: tuple[ModelFiles, Any]
) -> None:
    files, model = wide
    decoder = load_decoder(files, linear_backend=name)
    matrices = matrices_of(decoder._weights)
    assert {type(matrix) for matrix in matrices} == {FORMS[name]}
    probe = LogitsProbe(decoder)
    probe.add(0, token_ids())
    assert_close(probe.run(0, chunks), reference(model, token_ids()), 1e-3)


@NEEDS_MKL
def test_packing_leaves_nothing_of_the_floats_but_the_embedding(
    wide: tuple[ModelFiles, Any],
) -> None:
    decoder = load_decoder(wide[0])
    floats = [weakref.ref(matrix) for matrix in matrices_of(decoder._weights)]
    held = [decoder._weights]
    decoder.release_weights()
    weights = WeightForm(linear_backend="mkl").apply(held.pop())
    assert all(isinstance(matrix, PackedMatrix) for matrix in matrices_of(weights))
    assert [matrix() for matrix in floats if matrix() is not None] == [weights.embedding]


@pytest.mark.parametrize("name", NAMED)
def test_after_a_sleep_the_matrices_have_the_same_form(
    name: LinearBackendName, wide: tuple[ModelFiles, Any]
) -> None:
    model = SleepingModel(wide[0].path, linear_backend=name)
    model.add_all()
    expected = model.finish()
    model.fall_asleep(RELEASED_AT[2])
    model.wake_up()
    assert isinstance(model.memory._decoder._weights.layers[1].qkv, FORMS[name])
    model.add_all()
    assert model.finish() == expected


class TimedMatrix(StoredMatrix):
    """Takes its time by a clock of its own: seconds for a product of 1, 8 and 64 rows.

    The first products of any height take ten times as long.
    """

    def __init__(self, clock: list[float], product_s: tuple[float, float, float]) -> None:
        self._clock = clock
        self._product_s = dict(zip((1, 8, 64), product_s, strict=True))
        self._is_new = set(self._product_s)

    @property
    def shape(self) -> tuple[int, int]:
        return 4, 4

    @property
    def nbytes(self) -> int:
        return 0

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        num_rows = x.shape[0]
        self._clock[0] += self._product_s[num_rows] * (10 if num_rows in self._is_new else 1)
        self._is_new.discard(num_rows)
        return x


@pytest.mark.parametrize(
    ("torch_s", "swapped_s", "mkl_s", "expected"),
    [
        ((1, 2, 9), (2, 4, 18), (3, 6, 27), "torch"),
        ((2, 4, 18), (1, 2, 9), (3, 6, 27), "swapped"),
        ((3, 6, 27), (2, 4, 18), (1, 2, 9), "mkl"),
        ((1.04, 2.08, 9.36), (1, 2, 9), (1.02, 2.04, 9.18), "torch"),
        ((1.06, 2.12, 9.54), (1, 2, 9), (1.02, 2.04, 9.18), "swapped"),
        # A quarter less for the many rows, which take the longest, and half as long again for few.
        ((1, 2, 9), (1.5, 3, 6.75), (2, 4, 12), "torch"),
        # A little more for one row, and a quarter less for more of them.
        ((1, 2, 9), (1.8, 2.4, 10.8), (1.05, 1.5, 6.75), "mkl"),
    ],
)
def test_the_fastest_is_taken_and_the_simplest_if_none_gains_much(
    torch_s: Any, swapped_s: Any, mkl_s: Any, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    times: dict[LinearBackendName, Any] = {"torch": torch_s, "swapped": swapped_s, "mkl": mkl_s}
    forms: dict[LinearBackendName, list[list[Any]]] = {
        name: [[TimedMatrix(clock, product_s)] * 2 for _ in range(4)]
        for name, product_s in times.items()
    }
    assert _fastest(forms) == expected


def test_auto_measures_only_what_gains(
    wide: tuple[ModelFiles, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = open_checkpoint(wide[0]).config
    clock = itertools.count()  # as if everything took the same
    with monkeypatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: float(next(clock)))
        assert choose_linear_backend("auto", model, CPU, torch.float32) == "torch"
    assert next(clock) > 100
    assert choose_linear_backend("auto", model, CPU, torch.bfloat16) == "torch"
    assert choose_linear_backend("auto", model, torch.device("cuda"), torch.float32) == "torch"
    assert choose_linear_backend("swapped", model, CPU, torch.float32) == "swapped"
    folder, _ = make_hf_folder("llama", tmp_path / "tiny")
    tiny = open_checkpoint(ModelFiles("folder", folder)).config
    assert choose_linear_backend("auto", tiny, CPU, torch.float32) == "torch"


def without_mkl(*_: object) -> torch.Tensor:
    return torch.zeros(1)


@pytest.mark.parametrize(
    "operators", [{}, {"_mkl_linear": without_mkl, "_mkl_reorder_linear_weight": without_mkl}]
)
def test_a_torch_that_cannot_pack_or_packs_wrongly_does_without(
    operators: dict[str, Any], wide: tuple[ModelFiles, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.ops, "mkl", types.SimpleNamespace(**operators))
    assert not can_pack()
    model = open_checkpoint(wide[0]).config
    assert choose_linear_backend("auto", model, CPU, torch.float32) in ("torch", "swapped")
    config = EngineConfig(model=str(wide[0].path), device="cpu", linear_backend="mkl")
    message = "linear_backend 'mkl': this torch cannot multiply by MKL's packed matrices"
    with pytest.raises(ConfigError, match=message):
        TorchExecutor(config).load()


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"dtype": "bfloat16"}, "bfloat16 on 'cpu'"),
        ({"quantization": "int8"}, "quantization 'int8'"),
    ],
)
@pytest.mark.parametrize("name", ["swapped", "mkl"])
def test_only_float32_has_other_forms(
    name: LinearBackendName, options: dict[str, Any], kept: str, wide: tuple[ModelFiles, Any]
) -> None:
    path = str(wide[0].path)
    message = f"linear_backend '{name}' needs float32 weights on 'cpu', not {kept}"
    config = EngineConfig(model=path, device="cpu", linear_backend=name, **options)
    with pytest.raises(ConfigError, match=re.escape(message)):
        TorchExecutor(config).load()
    plain = EngineConfig(
        model=path, device="cpu", linear_backend="torch", kv_cache_bytes=1 << 20, **options
    )
    TorchExecutor(plain).load()


@NEEDS_MKL
def test_a_wake_up_that_fails_holds_on_to_nothing(
    wide: tuple[ModelFiles, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = SleepingModel(wide[0].path, linear_backend="mkl")
    model.fall_asleep(RELEASED_AT[2])
    packed: list[weakref.ref[torch.Tensor]] = []
    pack = torch.ops.mkl._mkl_reorder_linear_weight

    def pack_some(matrix: torch.Tensor, num_rows: int) -> torch.Tensor:
        if len(packed) == 5:
            raise torch.OutOfMemoryError("not enough memory")
        packed.append(weakref.ref(matrix))
        result: torch.Tensor = pack(matrix, num_rows)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(torch.ops, "mkl", types.SimpleNamespace(_mkl_reorder_linear_weight=pack_some))
        with pytest.raises(UtilityError, match="out of memory while waking up weights") as raised:
            model.command("wake_up", sorted(MEMORY_TAGS))
    assert len(packed) == 5
    assert not any(matrix() is not None for matrix in packed)
    assert raised.value.__cause__ is not None  # and is still here
    model.wake_up()
    model.add_all()
    model.finish()
