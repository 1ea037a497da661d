"""Weights from Hugging Face folders: equal to transformers', one at a time, no mapping kept."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.model.tiny_models import FAMILIES, make_hf_folder
from trio_engine.checkpoint import ModelFiles
from trio_engine.errors import ModelError
from trio_engine.model.loader import Checkpoint, open_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ARRAY_ENTRY = b'{"model.norm.weight": ["F32", [1], [0, 4]]}'
"""A header that the safetensors package takes."""
FIRST_OF_TWO = "model-00001-of-00002.safetensors"


def open_folder(folder: Path) -> Checkpoint:
    return open_checkpoint(ModelFiles("folder", folder))


def assert_same_tensors(checkpoint: Checkpoint, expected: dict[str, torch.Tensor]) -> None:
    found = dict(checkpoint.tensors())
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype
        assert tensor.is_contiguous()
        assert torch.equal(tensor, expected[name]), name


@pytest.fixture
def llama_folder(tmp_path: Path) -> Path:
    return make_hf_folder("llama", tmp_path / "llama")[0]


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_equals_that_of_transformers(family: str, shards: int, tmp_path: Path) -> None:
    folder, model = make_hf_folder(family, tmp_path, shards=shards)
    assert (folder / INDEX).exists() == (shards > 1)
    checkpoint = open_folder(folder)
    expected = model.state_dict()
    assert checkpoint.num_bytes == sum(tensor.nbytes for tensor in expected.values())
    assert_same_tensors(checkpoint, expected)


def test_biases_wide_heads_and_grouped_heads_are_expected(tmp_path: Path) -> None:
    folder, model = make_hf_folder(
        "llama", tmp_path, attention_bias=True, mlp_bias=True, head_dim=32, num_key_value_heads=1
    )
    assert_same_tensors(open_folder(folder), model.state_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tensors_come_in_the_stored_type(llama_folder: Path, dtype: torch.dtype) -> None:
    stored = {n: t.to(dtype) for n, t in load_file(llama_folder / SINGLE).items()}
    save_file(stored, llama_folder / SINGLE)
    assert_same_tensors(open_folder(llama_folder), stored)


def test_tied_embeddings_are_given_once_even_if_stored_twice(tmp_path: Path) -> None:
    folder, _ = make_hf_folder("llama", tmp_path, tie_word_embeddings=True)
    stored = load_file(folder / SINGLE)
    extra = {
        "lm_head.weight": stored["model.embed_tokens.weight"].clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8, dtype=torch.float64),
    }
    save_file(stored | extra, folder / SINGLE)
    assert_same_tensors(open_folder(folder), stored)


def test_the_file_is_never_mapped_and_tensors_outlive_it(llama_folder: Path) -> None:
    expected = load_file(llama_folder / SINGLE)
    expected = {name: tensor.clone() for name, tensor in expected.items()}
    found = {}
    for name, tensor in open_folder(llama_folder).tensors():
        assert str(llama_folder / SINGLE) not in Path("/proc/self/maps").read_text()
        found[name] = tensor
    (llama_folder / SINGLE).write_bytes(b"")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_closing_the_iterator_early_closes_the_file(llama_folder: Path) -> None:
    tensors = open_folder(llama_folder).tensors()
    next(tensors)
    tensors.close()  # type: ignore[attr-defined]
    opened = [path.resolve() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    assert llama_folder / SINGLE not in opened


def edit(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    """A damage done to the stored tensors."""

    def damage(folder: Path) -> None:
        stored = {name: tensor.clone() for name, tensor in load_file(folder / SINGLE).items()}
        change(stored)
        save_file(stored, folder / SINGLE)

    return damage


def truncate(folder: Path) -> None:
    data = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(data[:-1])


def replace_by_folder(folder: Path) -> None:
    (folder / SINGLE).unlink()
    (folder / SINGLE).mkdir()


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no weights": (lambda f: (f / SINGLE).unlink(), f"has neither {SINGLE} nor {INDEX}"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json: cannot be read: No such"),
    "empty": (lambda f: (f / SINGLE).write_bytes(b""), f"{SINGLE}: damaged or truncated: "),
    "truncated": (truncate, f"{SINGLE}: damaged or truncated: "),
    "garbage": (lambda f: (f / SINGLE).write_bytes(b"\xff" * 99), f"{SINGLE}: damaged or truncat"),
    "folder": (replace_by_folder, f"{SINGLE}: is missing"),
    "entry as an array": (
        lambda f: (f / SINGLE).write_bytes(
            struct.pack("<Q", len(ARRAY_ENTRY)) + ARRAY_ENTRY + b"4444"
        ),
        f"{SINGLE}: header: Expected `object`, got `array`",
    ),
    "missing tensor": (
        edit(lambda t: [t.pop(n) for n in list(t) if ".1." in n]),
        "lacks model.layers.1.input_layernorm.weight, model.layers.1.post_attention_layernorm."
        "weight, model.layers.1.self_attn.q_proj.weight and 6 more",
    ),
    "unknown tensor": (
        edit(lambda t: t.update(extra=torch.ones(1))),
        "has extra, no part of a llama model",
    ),
    "wrong shape": (
        edit(lambda t: t.update({"model.norm.weight": torch.ones(63)})),
        "model.norm.weight has shape [63], but the configuration calls for [64]",
    ),
    "wrong type": (
        edit(lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)})),
        f"{SINGLE}: model.norm.weight is of type I8, unsupported; F32, F16, BF16 are",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_folder_is_refused_when_opened(llama_folder: Path, name: str) -> None:
    damage, message = DAMAGES[name]
    damage(llama_folder)
    with pytest.raises(ModelError) as caught:
        open_folder(llama_folder)
    assert str(caught.value).startswith(str(llama_folder))
    assert message in str(caught.value)


def test_a_file_cut_short_after_opening_is_named(llama_folder: Path) -> None:
    checkpoint = open_folder(llama_folder)
    truncate(llama_folder)
    with pytest.raises(ModelError, match=rf"{SINGLE}: truncated: it ends within a tensor"):
        list(checkpoint.tensors())
    (llama_folder / SINGLE).unlink()
    with pytest.raises(ModelError, match=rf"{SINGLE}: cannot be read: No such file"):
        list(checkpoint.tensors())


@pytest.fixture
def sharded_folder(tmp_path: Path) -> Path:
    folder, _ = make_hf_folder("llama", tmp_path / "sharded")
    names = sorted(tensors := load_file(folder / SINGLE))
    weight_map: dict[str, str] = {}
    for shard, part in (
        (FIRST_OF_TWO, names[::2]),
        ("model-00002-of-00002.safetensors", names[1::2]),
    ):
        save_file({name: tensors[name] for name in part}, folder / shard)
        weight_map |= dict.fromkeys(part, shard)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    (folder / SINGLE).unlink()
    return folder


def test_a_missing_shard_is_named(sharded_folder: Path) -> None:
    (sharded_folder / FIRST_OF_TWO).unlink()
    with pytest.raises(ModelError, match=f"{FIRST_OF_TWO}: is missing"):
        open_folder(sharded_folder)


def test_a_tensor_in_two_shards_is_named(sharded_folder: Path) -> None:
    stored = load_file(sharded_folder / FIRST_OF_TWO)
    save_file(stored, sharded_folder / "model-00002-of-00002.safetensors")
    with pytest.raises(ModelError, match=r"00002-of-00002.safetensors: \S+ is in another shard"):
        open_folder(sharded_folder)


def test_a_shard_whose_name_no_file_can_have_is_named(sharded_folder: Path) -> None:
    name = "x" * 300 + ".safetensors"
    (sharded_folder / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ModelError, match=f"{name}: is missing"):
        open_folder(sharded_folder)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (b"{", "is not a JSON object"),
        (b"[]", "is not a JSON object"),
        (b"{}", "weight_map is missing or no object"),
        (b'{"weight_map": []}', "weight_map is missing or no object"),
        (b'{"weight_map": {"a": 1}}', "weight_map names 1, no safetensors file beside it"),
        (b'{"weight_map": {"a": ["b"]}}', "weight_map names ['b'], no safetensors file"),
        (b'{"weight_map": {"a": "../b.safetensors"}}', "weight_map names '../b.safetensors', no"),
        (b'{"weight_map": {"a": "b.bin"}}', "weight_map names 'b.bin', no safetensors file"),
    ],
)
def test_a_bad_index_is_named(sharded_folder: Path, index: bytes, message: str) -> None:
    (sharded_folder / INDEX).write_bytes(index)
    with pytest.raises(ModelError) as caught:
        open_folder(sharded_folder)
    assert str(caught.value).startswith(str(sharded_folder / INDEX))
    assert message in str(caught.value)


def test_the_config_decides_what_the_weights_must_be(llama_folder: Path) -> None:
    config: dict[str, Any] = json.loads((llama_folder / "config.json").read_text())
    (llama_folder / "config.json").write_text(json.dumps(config | {"mlp_bias": True}))
    with pytest.raises(ModelError, match=r"lacks model.layers.0.mlp.gate_proj.bias, "):
        open_folder(llama_folder)
