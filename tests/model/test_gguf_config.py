"""Configurations of GGUF files: as of the model they were made of, or refused by key and value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.model.tiny_models import FAMILIES, make_gguf, make_model
from trio_engine.errors import ModelError
from trio_engine.gguf_metadata import GGUFFile, TensorInfo, read_gguf
from trio_engine.model.config import RopeConfig
from trio_engine.model.gguf_config import parse_gguf_config
from trio_engine.model.hf_config import parse_hf_config

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
GGUF_VARIANTS: list[dict[str, Any]] = [
    {},
    {"tie_word_embeddings": True},
    {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}},
    {
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "rope_theta": 1e6,
            "original_max_position_embeddings": 64,
        }
    },
]


@pytest.mark.parametrize("variant", range(len(GGUF_VARIANTS)))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_gguf_says_the_same_as_the_folder_it_was_made_of(
    family: str, variant: int, tmp_path: Path
) -> None:
    model = make_model(family, **GGUF_VARIANTS[variant], rms_norm_eps=2**-17)
    path = make_gguf(family, tmp_path / "m.gguf", model)
    values = model.config.to_dict() | {"architectures": [type(model).__name__]}
    folder = parse_hf_config(path, values | {"dtype": "float32"}, {})
    file = parse_gguf_config(read_gguf(path))
    for name in folder.__struct_fields__:
        if name == "architecture" and family == "mistral":
            assert file.architecture == "llama"
        else:
            assert getattr(file, name) == getattr(folder, name), name


def test_llama3_of_a_gguf_comes_as_factors(tmp_path: Path) -> None:
    model = make_model("llama", rope_parameters=LLAMA3_ROPE)
    path = make_gguf("llama", tmp_path / "m.gguf", model)
    config = parse_gguf_config(read_gguf(path)).rope
    assert (config.kind, config.theta, len(config.freq_factors)) == ("factors", 5e5, 8)
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config, torch.device("cpu"))
    plain = 5e5 ** -(torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(plain / torch.tensor(config.freq_factors), theirs)


def gguf_file(changes: dict[str, Any], tensors: tuple[TensorInfo, ...] = ()) -> GGUFFile:
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 64,
        "llama.context_length": 64,
        "llama.attention.head_count": 4,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
    }
    kept = {key: value for key, value in (metadata | changes).items() if value is not None}
    embedding = TensorInfo("token_embd.weight", (10, 64), 1, 0, 0)
    return GGUFFile(Path("m.gguf"), kept, [embedding, *tensors])


def test_a_sparse_gguf_gets_the_defaults_of_llama_cpp() -> None:
    config = parse_gguf_config(gguf_file({}))
    assert (config.num_kv_heads, config.head_dim, config.rope) == (4, 16, RopeConfig())
    assert (config.bos_token_id, config.eos_token_ids, config.dtype) == (None, (), "float16")


def test_every_end_token_of_a_gguf_counts() -> None:
    ids = {"eos_token_id": 2, "eot_token_id": 9, "eom_token_id": 2}
    file = gguf_file({f"tokenizer.ggml.{key}": value for key, value in ids.items()})
    assert parse_gguf_config(file).eos_token_ids == (2, 9)


def test_the_linear_scale_of_old_files_is_understood() -> None:
    rope = parse_gguf_config(gguf_file({"llama.rope.scale_linear": 4.0})).rope
    assert rope == RopeConfig(kind="linear", factor=4.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "mamba"}, "general.architecture = 'mamba': unsupported"),
        ({"general.architecture": None}, "general.architecture is missing"),
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.attention.head_count": [4, 4]}, "llama.attention.head_count = [4, 4]: is not an"),
        ({"llama.attention.head_count": 5}, "head_count = 5: does not divide embedding_length"),
        ({"llama.attention.value_length": 8}, "value_length = 8: unsupported: differs from"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count = 8: unsupported: differs from"),
        ({"llama.attention.sliding_window_pattern": 6}, "sliding_window_pattern = 6: unsupported"),
        ({"llama.expert_count": 8}, "llama.expert_count = 8: mixtures of experts"),
        ({"split.count": 2}, "split.count = 2: models in several GGUF files"),
        ({"llama.rope.scaling.type": "longrope"}, "rope.scaling.type = 'longrope': unsupported"),
        (
            {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.yarn_ext_factor": 0.5},
            "llama.rope.scaling.yarn_ext_factor = 0.5: unsupported",
        ),
        ({"tokenizer.ggml.eos_token_id": 10}, "tokenizer.ggml.eos_token_id = 10: is outside"),
    ],
)
def test_a_gguf_that_cannot_be_run_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as caught:
        parse_gguf_config(gguf_file(changes))
    assert str(caught.value).startswith("m.gguf: ")
    assert message in str(caught.value)


def test_a_window_that_does_not_say_which_layers_slide_is_refused() -> None:
    file = gguf_file({})
    qwen = {key.replace("llama.", "qwen2."): value for key, value in file.metadata.items()}
    qwen |= {"general.architecture": "qwen2", "qwen2.attention.sliding_window": 32}
    with pytest.raises(ModelError, match=r"qwen2.attention.sliding_window = 32: unsupported"):
        parse_gguf_config(GGUFFile(file.path, qwen, file.tensors))


def test_a_gguf_without_embedding_is_refused() -> None:
    file = gguf_file({})
    with pytest.raises(ModelError, match=r"m.gguf: has no matrix token_embd.weight"):
        parse_gguf_config(GGUFFile(file.path, file.metadata, []))


def test_frequency_factors_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(bytes(32))
    file = gguf_file({})
    for shape, message in (((8,), "not positive and finite"), ((4,), r"expected \(8,\) of F32")):
        factors = TensorInfo("rope_freqs.weight", shape, 0, 0, 32)
        broken = GGUFFile(path, file.metadata, [*file.tensors, factors])
        with pytest.raises(ModelError, match=message):
            parse_gguf_config(broken)
    both = gguf_file({"llama.rope.scaling.type": "linear"}, (factors,))
    with pytest.raises(ModelError, match=r"unsupported together with rope_freqs.weight"):
        parse_gguf_config(both)
