"""Configurations of folders: as transformers has them, or refused by file, key and value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings, strategies as st
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.model.tiny_models import FAMILIES, make_hf_folder
from trio_engine.errors import ModelError
from trio_engine.model.config import ModelConfig, RopeConfig
from trio_engine.model.hf_config import parse_hf_config, read_hf_config

SOURCE = Path("folder/config.json")
LLAMA2: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "torch_dtype": "float16",
    "vocab_size": 32000,
}
"""As published: before rope_theta, grouped attention and head_dim had keys."""

LLAMA31_ROPE = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
QWEN: dict[str, Any] = LLAMA2 | {
    "architectures": ["Qwen2ForCausalLM"],
    "num_key_value_heads": 4,
    "max_window_layers": 1,
    "sliding_window": 1024,
}
QWEN3 = QWEN | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 128}
MISTRAL: dict[str, Any] = LLAMA2 | {
    "architectures": ["MistralForCausalLM"],
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
}
HF_VARIANTS: list[dict[str, Any]] = [
    {},
    {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}},
    {"rope_parameters": LLAMA31_ROPE | {"rope_theta": 5e5}, "max_position_embeddings": 131072},
    {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}},
    {
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "rope_theta": 1e4,
            "original_max_position_embeddings": 64,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "mscale": 0.7,
            "mscale_all_dim": 0.5,
            "truncate": False,
        }
    },
    {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.5}},
    {
        "tie_word_embeddings": True,
        "num_key_value_heads": 4,
        "eos_token_id": [2, 3],
        "dtype": "bfloat16",
    },
]


def parse(values: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    return parse_hf_config(SOURCE, values, generation or {})


def assert_same_rope(rope: RopeConfig, theirs: transformers.PretrainedConfig) -> None:
    parameters = theirs.rope_parameters
    assert rope.kind == parameters["rope_type"]
    assert rope.theta == parameters["rope_theta"]
    if rope.kind == "default":
        return
    _, attention_factor = ROPE_INIT_FUNCTIONS[rope.kind](theirs, torch.device("cpu"))
    assert rope.attention_factor == pytest.approx(attention_factor)
    for key in set(parameters) & set(rope.__struct_fields__) - {"attention_factor"}:
        assert getattr(rope, key) == parameters[key]


def assert_same(config: ModelConfig, theirs: transformers.PretrainedConfig) -> None:
    assert config.architecture == theirs.model_type
    for ours, key in (("num_layers", "num_hidden_layers"), ("num_heads", "num_attention_heads")):
        assert getattr(config, ours) == getattr(theirs, key)
    for key in ("vocab_size", "hidden_size", "intermediate_size", "rms_norm_eps"):
        assert getattr(config, key) == getattr(theirs, key)
    for key in ("max_position_embeddings", "tie_word_embeddings", "bos_token_id"):
        assert getattr(config, key) == getattr(theirs, key)
    assert config.num_kv_heads == theirs.num_key_value_heads
    assert config.head_dim == getattr(theirs, "head_dim", config.hidden_size // config.num_heads)
    eos = theirs.eos_token_id
    assert config.eos_token_ids == tuple(eos if isinstance(eos, list) else [eos])
    assert config.dtype == str(theirs.dtype).removeprefix("torch.")
    assert_same_rope(config.rope, theirs)


@pytest.mark.parametrize("variant", range(len(HF_VARIANTS)))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_configuration_is_read_as_transformers_reads_it(
    family: str, variant: int, tmp_path: Path
) -> None:
    folder, _ = make_hf_folder(family, tmp_path, **HF_VARIANTS[variant])
    assert_same(read_hf_config(folder), transformers.AutoConfig.from_pretrained(folder))


@pytest.mark.parametrize(
    "rope", [LLAMA31_ROPE, {"type": "linear", "factor": 2}, {"type": "yarn", "factor": 4}]
)
def test_the_spelling_of_transformers_4_means_the_same(rope: dict[str, Any]) -> None:
    values = LLAMA2 | {"rope_theta": 500000, "rope_scaling": rope}
    theirs = transformers.LlamaConfig(**json.loads(json.dumps(values)))
    assert_same_rope(parse(values).rope, theirs)


def test_llama_2_as_published() -> None:
    assert parse(LLAMA2) == ModelConfig(
        architecture="llama",
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_layers=2,
        num_heads=32,
        num_kv_heads=32,
        head_dim=128,
        rms_norm_eps=1e-05,
        max_position_embeddings=4096,
        rope=RopeConfig(theta=10000.0),
        tie_word_embeddings=False,
        attention_bias=False,
        attention_out_bias=False,
        mlp_bias=False,
        qk_norm=False,
        sliding_window=None,
        layer_is_sliding=(False, False),
        bos_token_id=1,
        eos_token_ids=(2,),
        dtype="float16",
    )


@pytest.mark.parametrize(
    ("values", "qkv", "out", "mlp", "qk_norm"),
    [
        (LLAMA2 | {"attention_bias": True}, True, True, False, False),
        (LLAMA2 | {"mlp_bias": True}, False, False, True, False),
        (MISTRAL | {"attention_bias": True, "mlp_bias": True}, False, False, False, False),
        (QWEN | {"attention_bias": False}, True, False, False, False),
        (QWEN3, False, False, False, True),
        (QWEN3 | {"attention_bias": True}, True, True, False, True),
    ],
)
def test_each_family_has_its_biases_and_norms(
    values: dict[str, Any], qkv: bool, out: bool, mlp: bool, qk_norm: bool
) -> None:
    config = parse(values)
    found = (config.attention_bias, config.attention_out_bias, config.mlp_bias, config.qk_norm)
    assert found == (qkv, out, mlp, qk_norm)


@pytest.mark.parametrize(
    ("values", "window", "layers"),
    [
        (MISTRAL, 4096, (True, True)),
        (MISTRAL | {"sliding_window": 512}, 512, (True, True)),
        (MISTRAL | {"sliding_window": None}, None, (False, False)),
        (QWEN, None, (False, False)),
        (QWEN | {"use_sliding_window": True}, 1024, (False, True)),
        (QWEN | {"use_sliding_window": True, "max_window_layers": 2}, None, (False, False)),
        (
            QWEN3
            | {
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            1024,
            (True, False),
        ),
    ],
)
def test_sliding_layers(values: dict[str, Any], window: int | None, layers: Any) -> None:
    config = parse(values)
    assert (config.sliding_window, config.layer_is_sliding) == (window, layers)


def test_the_end_tokens_of_both_files_count_and_the_first_is_that_of_config_json() -> None:
    assert parse(LLAMA2, {"eos_token_id": [7, 2, 9]}).eos_token_ids == (2, 7, 9)
    assert parse(LLAMA2 | {"eos_token_id": None}).eos_token_ids == ()
    assert parse(LLAMA2 | {"bos_token_id": None}).bos_token_id is None


@pytest.mark.parametrize(
    ("rope", "context_length"),
    [
        (None, 4096),
        ({"type": "linear", "factor": 2.0}, 8192),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}, 8192),
        (LLAMA31_ROPE, 4096),
    ],
)
def test_context_length_is_stretched_where_vllm_stretches_it(
    rope: dict[str, Any] | None, context_length: int
) -> None:
    assert parse(LLAMA2 | {"rope_scaling": rope}).context_length == context_length


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["GPT2LMHeadModel"]}, "architectures = ['GPT2LMHeadModel']: unsupported"),
    ({"architectures": "LlamaForCausalLM"}, "architectures = 'LlamaForCausalLM': unsupported"),
    ({"architectures": [["LlamaForCausalLM"]]}, "architectures = [['LlamaForCausalLM']]: unsup"),
    ({"architectures": None}, "architectures is missing"),
    ({"hidden_size": None}, "hidden_size is missing"),
    ({"hidden_size": "4096"}, "hidden_size = '4096': is not an integer"),
    ({"hidden_size": True}, "hidden_size = True: is not an integer"),
    ({"hidden_size": 4097}, "num_attention_heads = 32: does not divide hidden_size = 4097"),
    ({"vocab_size": 0}, "vocab_size = 0: is not between 1 and"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000: is not between 1 and 10000"),
    ({"num_key_value_heads": 5}, "32 attention heads cannot share 5 key and value heads"),
    ({"head_dim": 127}, "a head of odd width 127"),
    ({"rms_norm_eps": None}, "rms_norm_eps is missing"),
    ({"rms_norm_eps": 0}, "rms_norm_eps = 0: is not positive and finite"),
    ({"rms_norm_eps": 10**400}, "rms_norm_eps = 10000"),
    ({"rms_norm_eps": "1e-5"}, "rms_norm_eps = '1e-5': is not a number"),
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu': unsupported; only silu is"),
    ({"hidden_act": 1}, "hidden_act = 1: is not a string"),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings = 1: is neither true nor false"),
    ({"quantization_config": {"bits": 4}}, "quantization_config = {'bits': 4}: quantized folders"),
    ({"torch_dtype": "int8"}, "torch_dtype = 'int8': unsupported; one of float32, bfloat16"),
    ({"bos_token_id": -1}, "bos_token_id = -1: is outside a vocabulary of 32000"),
    ({"eos_token_id": [2, 32000]}, "eos_token_id = [2, 32000]: is outside a vocabulary of 32000"),
    ({"eos_token_id": "</s>"}, "eos_token_id = '</s>': is neither a token id nor a list"),
    ({"layer_types": ["sliding_attention"] * 2}, "names sliding layers in a model without"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5: unsupported; only whole"),
    ({"rope_theta": -1.0}, "rope_theta = -1.0: is not positive"),
    ({"rope_scaling": ["linear"]}, "rope_scaling = ['linear']: is not an object"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.type = 'dynamic': unsupp"),
    ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
    ({"rope_parameters": {"full_attention": {}}}, "rope_parameters = {'full_attention': {}}: unsu"),
    (
        {"rope_parameters": LLAMA31_ROPE | {"low_freq_factor": 4.0}},
        "rope_parameters.low_freq_factor = 4.0: is not below high_freq_factor = 4.0",
    ),
    (
        {"rope_scaling": {"type": "linear", "factor": 1e308}},
        "a context of inf tokens, RoPE's factor of 1e+308 included, is not between 1 and",
    ),
    (
        {"rope_scaling": {"type": "yarn", "factor": 1e-9}},
        "a context of 4.096e-06 tokens, RoPE's factor of 1e-09 included, is not between 1 and",
    ),
    (
        {"rope_scaling": {"type": "yarn", "factor": 1e5, "mscale": 1.7e308, "mscale_all_dim": 1}},
        "RoPE's attention factor is inf",
    ),
    (
        {"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": "no"}},
        "rope_scaling.truncate = 'no': is neither true nor false",
    ),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_cannot_be_run_is_refused_by_file_key_and_value(number: int) -> None:
    changes, message = REFUSED[number]
    with pytest.raises(ModelError) as caught:
        parse(LLAMA2 | changes)
    assert str(caught.value).startswith(f"{SOURCE}: ")
    assert message in str(caught.value)


def test_json_nested_too_deeply_is_refused_by_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ' + "[" * 10_000)
    with pytest.raises(ModelError, match=r"config\.json: is not a JSON object: .*recursion"):
        read_hf_config(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": None}, "num_key_value_heads is missing"),
        ({"head_dim": None}, "head_dim is missing"),
        ({"layer_types": ["full_attention"]}, "is not a list of 2, one for each layer"),
        ({"layer_types": ["full_attention", "linear"]}, "names an unsupported kind of layer"),
        ({"layer_types": [[], []]}, "names an unsupported kind of layer"),
        ({"max_window_layers": None}, "max_window_layers is missing"),
        ({"sliding_window": None}, "sliding_window is missing"),
    ],
)
def test_qwen3_without_what_it_needs_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as caught:
        parse(QWEN3 | {"use_sliding_window": True} | changes)
    assert message in str(caught.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**40) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=3,
)


@given(
    values=st.sampled_from([LLAMA2, MISTRAL, QWEN, QWEN3 | {"use_sliding_window": True}]),
    changes=st.dictionaries(
        st.sampled_from(sorted({*QWEN3, "layer_types", "rope_parameters"})), JSON
    ),
    rope=st.dictionaries(st.sampled_from(sorted({*LLAMA31_ROPE, "type", "mscale"})), JSON),
    kind=st.sampled_from(["linear", "llama3", "yarn"]),
)
@settings(deadline=None)
def test_any_json_is_a_configuration_or_a_model_error(
    values: dict[str, Any], changes: dict[str, Any], rope: dict[str, Any], kind: str
) -> None:
    scaling = {"rope_scaling": LLAMA31_ROPE | {"rope_type": kind} | rope}
    config, message = None, str(SOURCE)
    try:
        config = parse(values | scaling | changes)
    except ModelError as error:
        message = str(error)
    assert message.startswith(str(SOURCE))
    if config is not None:
        assert len(config.layer_is_sliding) == config.num_layers
        assert (config.sliding_window is None) == (not any(config.layer_is_sliding))


def test_a_folder_without_a_readable_configuration_is_named(tmp_path: Path) -> None:
    config, generation = tmp_path / "config.json", tmp_path / "generation_config.json"
    with pytest.raises(ModelError, match=f"^{config}: cannot be read: No such file"):
        read_hf_config(tmp_path)
    for text in (b"[1]", b"{", b"", b'{"a": "\xff"}'):
        config.write_bytes(text)
        with pytest.raises(ModelError, match=f"^{config}: is not a JSON object"):
            read_hf_config(tmp_path)
    config.write_text(json.dumps(LLAMA2))
    generation.write_text('{"eos_token_id": 99999}')
    with pytest.raises(ModelError, match=f"^{generation}: eos_token_id = 99999: is outside"):
        read_hf_config(tmp_path)
