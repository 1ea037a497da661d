"""Any config.json and generation_config.json give a ModelConfig or raise ModelError by name.

The input is the two files; the second may be absent.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from fuzz.model_inputs import CONFIG, changed_objects, folder_of, to_json
from fuzz.target import Target, join, split
from trio_engine.errors import ModelError
from trio_engine.model.hf_config import read_hf_config

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trio_engine.model.config import ModelConfig

_NAMES = ["config.json", "generation_config.json"]
_FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"attention_bias": True, "mlp_bias": True, "rope_theta": 500000.0},
    "MistralForCausalLM": {"sliding_window": 8, "head_dim": 4},
    "Qwen2ForCausalLM": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
    "Qwen3ForCausalLM": {"head_dim": 2, "layer_types": ["full_attention"]},
}
_ROPES: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 2.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8,
    },
    {"type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.5, "truncate": False},
]
_TOKENS = {"bos_token_id": 1, "eos_token_id": [2, 3], "torch_dtype": "bfloat16"}
_ROPE_KEYS = sorted({key for rope in _ROPES for key in rope} | {"attention_factor", "rope_theta"})


def check(data: bytes) -> bool:
    with folder_of(dict(zip(_NAMES, split(data), strict=False))) as folder:
        try:
            config = read_hf_config(folder)
        except ModelError as error:
            assert str(error).startswith(str(folder))
            return False
    check_usable(config)
    return True


def check_usable(config: ModelConfig) -> None:
    """A configuration that was accepted can be computed with."""
    assert config.context_length > 0
    assert math.isfinite(config.rope.attention_factor)
    assert len(config.layer_is_sliding) == config.num_layers
    assert all(0 <= token < config.vocab_size for token in config.eos_token_ids)
    assert config.num_heads % config.num_kv_heads == 0


def make_seeds() -> Iterator[bytes]:
    for architecture, more in _FAMILIES.items():
        yield join([to_json(CONFIG | {"architectures": [architecture]} | more)])
    for rope in _ROPES:
        files = [to_json(CONFIG | {"rope_scaling": rope} | _TOKENS), b'{"eos_token_id": 0}']
        yield join(files)


def _made_up() -> st.SearchStrategy[bytes]:
    keys = sorted({key for more in _FAMILIES.values() for key in more} | CONFIG.keys())
    architectures = st.sampled_from([[name] for name in _FAMILIES])
    whole = architectures.flatmap(
        lambda names: changed_objects(
            CONFIG | {"architectures": names}, [*keys, *_TOKENS, "rope_parameters"]
        )
    )
    ropes = st.sampled_from(_ROPES).flatmap(lambda rope: changed_objects(rope, _ROPE_KEYS))
    stretched = ropes.map(lambda rope: to_json(CONFIG)[:-1] + b', "rope_scaling": ' + rope + b"}")
    generation = changed_objects({}, ["eos_token_id"])
    return st.tuples(whole | stretched, generation).map(join) | whole.map(lambda file: join([file]))


TARGET = Target("hf_config", __doc__, check, st.binary(max_size=200) | _made_up(), make_seeds)
