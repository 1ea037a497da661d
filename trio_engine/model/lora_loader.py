"""Loads an adapter from a folder as the PEFT library writes it.

Layer: model. ``adapter_config.json`` and ``adapter_model.safetensors``; what an adapter may do
beyond low-rank matrices on the linear layers (DoRA, biases, whole modules) is refused by name.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from trio_engine.errors import ModelError
from trio_engine.model.fields import Fields
from trio_engine.model.hf_config import read_json_object
from trio_engine.model.lora import LoRAAdapter, LoRAMatrices
from trio_engine.model.safetensors_file import SafetensorsFile

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trio_engine.model.config import ModelConfig
    from trio_engine.model.lora import LoRASite

_NAME = re.compile(
    r"base_model\.model\.(?P<module>model\.layers\.(?P<layer>\d+)\."
    r"(?P<part>self_attn\.[qkvo]_proj|mlp\.(?:gate|up|down)_proj))\.lora_(?P<side>[AB])\.weight"
)
# What must be off, by PEFT's name, and the value that it has then.
_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "use_dora": (False,),
    "bias": ("none",),
    "lora_bias": (False,),
    "fan_in_fan_out": (False,),
    "modules_to_save": ([],),
    "trainable_token_indices": ([], {}),
    "target_parameters": ([],),
}


class _Part(NamedTuple):
    """One of the matrices that are fused at a site: its rows of the output, and its input."""

    name: str
    out_size: int
    in_size: int


class _Sides(NamedTuple):
    """A pair of an adapter's tensors as read: ``a`` ``[rank, in]``, ``b`` ``[out, rank]``."""

    a: Tensor
    b: Tensor


def load_adapter(
    folder: str,
    lora_id: int,
    model: ModelConfig,
    *,
    max_rank: int,
    dtype: torch.dtype,
    device: torch.device,
) -> LoRAAdapter:
    """Reads an adapter for a model.

    Args:
        folder: as ``PeftModel.save_pretrained`` leaves it.
        lora_id: the adapter's number.
        model: that it is for.
        max_rank: the highest rank taken.
        dtype: of the matrices.
        device: of the matrices.

    Raises:
        ModelError: missing, damaged, unsupported, of a higher rank or for another model; names
            the file and what is wrong with it.
    """
    path = Path(folder)
    config_path = path / "adapter_config.json"
    config = Fields(config_path, read_json_object(config_path))
    _check_config(config)
    file = SafetensorsFile(path / "adapter_model.safetensors")
    pairs = _read_pairs(file, model)
    _check_pairs(file.path, pairs, model, max_rank)
    layers = tuple(
        _layer_matrices(config, pairs, index, model, dtype=dtype, device=device)
        for index in range(model.num_layers)
    )
    return LoRAAdapter(lora_id, layers)


def _check_config(config: Fields) -> None:
    if config.text("peft_type") != "LORA":
        config.fail("peft_type", "only LORA adapters are supported")
    for key, off in _UNSUPPORTED.items():
        value = config.raw(key)
        if value is not None and value not in off:
            config.fail(key, "is not supported")


def _read_pairs(file: SafetensorsFile, model: ModelConfig) -> dict[str, _Sides]:
    """The tensors by module, ``model.layers.<i>.<part>``."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in file.tensors():
        match = _NAME.fullmatch(name)
        if match is None or int(match["layer"]) >= model.num_layers:
            raise ModelError(f"{file.path}: {name} belongs to no linear layer of this model")
        found.setdefault(match["module"], {})[match["side"]] = tensor
    for module, sides in found.items():
        if len(sides) != 2:
            raise ModelError(f"{file.path}: {module} has lora_{min(sides)} alone")
    if not found:
        raise ModelError(f"{file.path}: holds no adapter")
    return {module: _Sides(sides["A"], sides["B"]) for module, sides in found.items()}


def _check_pairs(
    path: Path, pairs: Mapping[str, _Sides], model: ModelConfig, max_rank: int
) -> None:
    parts = {part.name: part for site in _sites(model).values() for part in site}
    for module, (a, b) in pairs.items():
        part = parts[module.split(".", 3)[3]]
        rank = a.shape[0]
        if (a.shape, b.shape) != ((rank, part.in_size), (part.out_size, rank)):
            raise ModelError(
                f"{path}: {module} is of shape {list(b.shape)} x {list(a.shape)}, but the model's"
                f" layer is {part.out_size} x {part.in_size}"
            )
        if not 1 <= rank <= max_rank:
            raise ModelError(f"{path}: {module} has rank {rank}, max_lora_rank is {max_rank}")


def _sites(model: ModelConfig) -> dict[LoRASite, list[_Part]]:
    hidden, intermediate = model.hidden_size, model.intermediate_size
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    attention = {"q": queries, "k": keys, "v": keys}
    return {
        "qkv": [_Part(f"self_attn.{p}_proj", n, hidden) for p, n in attention.items()],
        "out": [_Part("self_attn.o_proj", hidden, queries)],
        "gate_up": [_Part(f"mlp.{p}_proj", intermediate, hidden) for p in ("gate", "up")],
        "down": [_Part("mlp.down_proj", hidden, intermediate)],
    }


def _layer_matrices(
    config: Fields,
    pairs: Mapping[str, _Sides],
    layer: int,
    model: ModelConfig,
    **options: Any,
) -> dict[LoRASite, LoRAMatrices]:
    matrices = {}
    for site, parts in _sites(model).items():
        modules = [f"model.layers.{layer}.{part.name}" for part in parts]
        if not any(module in pairs for module in modules):
            continue
        scaled = [
            _scaled(config, module, pairs[module]) if module in pairs else _nothing(part)
            for module, part in zip(modules, parts, strict=True)
        ]
        matrices[site] = LoRAMatrices(
            torch.cat([sides.a for sides in scaled]).to(**options),
            torch.block_diag(*(s.b for s in scaled)).to(**options),  # type: ignore[no-untyped-call]
        )
    return matrices


def _nothing(part: _Part) -> _Sides:
    """For a part of a fused site that the adapter leaves alone: rank 0."""
    return _Sides(torch.zeros(0, part.in_size), torch.zeros(part.out_size, 0))


def _scaled(config: Fields, module: str, sides: _Sides) -> _Sides:
    """In float32, with the scale in ``b``: alpha over the rank, or over its root (rsLoRA)."""
    rank = sides.a.shape[0]
    alpha = _pattern_value(config, "alpha_pattern", module) or config.number("lora_alpha")
    scale = alpha / (math.sqrt(rank) if config.flag("use_rslora", False) else rank)
    return _Sides(sides.a.float(), sides.b.float() * scale)


def _pattern_value(config: Fields, key: str, module: str) -> float | None:
    """The value of the first pattern that fits the end of a module's name, as in PEFT."""
    patterns = config.raw(key) or {}
    if not isinstance(patterns, dict):
        config.fail(key, "is not an object")
    for pattern in patterns:
        try:
            fits = re.match(rf"(.*\.)?({pattern})$", module) is not None
        except re.error as error:
            config.fail(key, f"{pattern!r} is no pattern: {error}")
        if fits:
            return Fields(config.source, patterns).number(pattern)
    return None
