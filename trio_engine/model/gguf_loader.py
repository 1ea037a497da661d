"""Loads weights from one GGUF file, dequantized to float32 where they are quantized.

Layer: model. The arithmetic of quantization is the ``gguf`` package's.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch

from trio_engine.errors import ModelError
from trio_engine.gguf_metadata import read_gguf
from trio_engine.model.expected_tensors import check_tensors
from trio_engine.model.gguf_config import ROPE_FACTORS, parse_gguf_config
from trio_engine.model.tensor_file import TensorFile

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from trio_engine.gguf_metadata import TensorInfo
    from trio_engine.model.config import ModelConfig

_TYPES = gguf.GGMLQuantizationType
_STORED_DTYPES = {
    _TYPES.F32: torch.float32,
    _TYPES.F16: torch.float16,
    _TYPES.BF16: torch.bfloat16,
}
_QUANTIZED = frozenset(
    {
        _TYPES.Q4_0,
        _TYPES.Q4_1,
        _TYPES.Q5_0,
        _TYPES.Q5_1,
        _TYPES.Q8_0,
        _TYPES.Q2_K,
        _TYPES.Q3_K,
        _TYPES.Q4_K,
        _TYPES.Q5_K,
        _TYPES.Q6_K,
    }
)
# Dequantizing is fastest while its temporaries fit the second-level cache (2 cores, AVX2).
_CHUNK_ELEMENTS = 1 << 17

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")


class GGUFCheckpoint:
    """A GGUF file as a ``Checkpoint``.

    Raises:
        ModelError: missing, damaged or unsupported; names the file and what is wrong with it.
    """

    def __init__(self, path: Path) -> None:
        file = read_gguf(path)
        self.config: ModelConfig = parse_gguf_config(file)
        self._path = path
        self._tensors = {hf_name(info.name): info for info in file.tensors}
        self._tensors.pop(ROPE_FACTORS, None)
        found = {name: info.shape for name, info in self._tensors.items()}
        check_tensors(path, self.config, found)
        for info in self._tensors.values():
            _check_type(path, info)

    @property
    def num_bytes(self) -> int:
        return sum(info.num_bytes for info in self._tensors.values())

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See ``Checkpoint.tensors``."""
        with TensorFile(self._path) as file:
            for name, info in self._tensors.items():
                tensor = _read(file, info)
                heads = self._permuted_heads(name)
                yield name, unpermute(tensor, heads) if heads else tensor

    def _permuted_heads(self, name: str) -> int:
        if self.config.architecture != "llama":
            return 0
        if ".q_proj." in name:
            return self.config.num_heads
        return self.config.num_kv_heads if ".k_proj." in name else 0


def hf_name(name: str) -> str:
    """Translates a tensor's name; one that is not known stays as it is."""
    match = _NAME.fullmatch(name)
    layer, base, kind = match.groups() if match else (None, "", "")
    if layer is None:
        return f"{_NAMES[base]}.{kind}" if base in _NAMES else name
    return f"model.layers.{layer}.{_LAYER_NAMES[base]}.{kind}" if base in _LAYER_NAMES else name


def unpermute(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Puts the rows of q or k back into Hugging Face's order.

    llama.cpp rotates neighbouring pairs of a head's rows, Hugging Face its two halves; files of
    the llama architecture have the rows reordered accordingly.

    Args:
        tensor: ``[num_heads * head_dim, ...]``.
        num_heads: heads that share the first dimension.
    """
    pairs = tensor.view(num_heads, tensor.shape[0] // num_heads // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


def _check_type(path: Path, info: TensorInfo) -> None:
    if info.ggml_type not in _STORED_DTYPES and info.ggml_type not in _QUANTIZED:
        names = ", ".join(sorted(kind.name for kind in _QUANTIZED.union(_STORED_DTYPES)))
        raise ModelError(
            f"{path}: tensor {info.name} is of type {_TYPES(info.ggml_type).name}, unsupported; "
            f"{names} are"
        )


def _read(file: TensorFile, info: TensorInfo) -> torch.Tensor:
    kind = _TYPES(info.ggml_type)
    if kind in _STORED_DTYPES:
        return file.tensor(info.offset, info.shape, _STORED_DTYPES[kind])
    tensor = torch.empty(info.shape, dtype=torch.float32)
    _dequantize(file, info.offset, kind, tensor.view(-1).numpy())
    return tensor


def _dequantize(
    file: TensorFile,
    offset: int,
    kind: gguf.GGMLQuantizationType,
    out: np.ndarray[Any, np.dtype[np.float32]],
) -> None:
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    buffer = np.empty(_CHUNK_ELEMENTS // block_size * block_bytes, dtype=np.uint8)
    for start in range(0, len(out), _CHUNK_ELEMENTS):
        part = out[start : start + _CHUNK_ELEMENTS]
        data = buffer[: len(part) // block_size * block_bytes]
        file.read_into(offset + start // block_size * block_bytes, data.data)
        # One row: blocks do not depend on rows, and the package works in groups of 16 rows.
        part[:] = gguf.quants.dequantize(data.reshape(1, -1), kind)[0]
