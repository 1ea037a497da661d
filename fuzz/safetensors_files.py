"""Any safetensors files and index open and give their tensors, or raise ModelError by name.

The input is one file, or an index and its shards.
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from fuzz.model_inputs import CONFIG, changed_objects, folder_of, json_values, to_json
from fuzz.target import Target, join, split
from trio_engine.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

_INDEX = "model.safetensors.index.json"
_SHARDS = [f"model-{number}.safetensors" for number in range(1, 8)]
_LAYER = "model.layers.0."
SHAPES = {
    "model.embed_tokens.weight": (4, 4),
    "model.norm.weight": (4,),
    f"{_LAYER}input_layernorm.weight": (4,),
    f"{_LAYER}post_attention_layernorm.weight": (4,),
    f"{_LAYER}self_attn.q_proj.weight": (4, 4),
    f"{_LAYER}self_attn.k_proj.weight": (2, 4),
    f"{_LAYER}self_attn.v_proj.weight": (2, 4),
    f"{_LAYER}self_attn.o_proj.weight": (4, 4),
    f"{_LAYER}mlp.gate_proj.weight": (4, 4),
    f"{_LAYER}mlp.up_proj.weight": (4, 4),
    f"{_LAYER}mlp.down_proj.weight": (4, 4),
}
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I8": 1}


def check(data: bytes) -> bool:
    first, *shards = split(data) or [b""]
    if shards:
        files = {_INDEX: first, **dict(zip(_SHARDS, shards, strict=False))}
    else:
        files = {"model.safetensors": first}
    with folder_of({"config.json": to_json(CONFIG), **files}) as folder:
        try:
            return _is_read_whole(folder)
        except ModelError as error:
            assert str(error).startswith(str(folder))
            return False


def _is_read_whole(folder: Path) -> bool:
    # Here and not above: this imports torch, which the other targets do without.
    from trio_engine.model.safetensors_loader import SafetensorsCheckpoint

    checkpoint = SafetensorsCheckpoint(folder)
    tensors = dict(checkpoint.tensors())
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == SHAPES
    assert sum(tensor.nbytes for tensor in tensors.values()) == checkpoint.num_bytes
    return True


def _file(names: list[str], dtype: str = "F32", *, more: Mapping[str, Any] | None = None) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in names:
        shape = SHAPES[name]
        end = offset + _ITEM_BYTES[dtype] * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    return _with_header(to_json(header | dict(more or {})), bytes(offset))


def _with_header(header: bytes, data: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def make_seeds() -> Iterator[bytes]:
    names = sorted(SHAPES)
    for dtype in ("F32", "BF16"):
        yield join([_file(names, dtype)])
    inverse = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    yield join([_file(names, more={f"{_LAYER}self_attn.rotary_emb.inv_freq": inverse})])
    halves = names[::2], names[1::2]
    weight_map = {name: _SHARDS[half] for half in (0, 1) for name in halves[half]}
    index = json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}).encode()
    yield join([index, *(_file(half) for half in halves)])


def _made_up() -> st.SearchStrategy[bytes]:
    entry: dict[str, Any] = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    entries = changed_objects(entry, [*entry, "more"])
    headers = entries.map(lambda value: b'{"model.norm.weight": ' + value + b"}")
    headers |= changed_objects({"a": entry}, ["a", "b", "__metadata__"])
    single = st.builds(_with_header, headers | st.binary(max_size=40), st.binary(max_size=8))
    names = st.sampled_from([_SHARDS[0], "../x.safetensors", "\0.safetensors", "x" * 300 + _INDEX])
    names |= st.just("x" * 300 + ".safetensors")
    weight_maps = st.dictionaries(st.sampled_from(["a", "b"]), names, max_size=2) | json_values()
    indexes = weight_maps.map(lambda value: to_json({"weight_map": value}))
    return single.map(lambda file: join([file])) | st.tuples(indexes, single).map(join)


TARGET = Target(
    "safetensors_files", __doc__, check, st.binary(max_size=200) | _made_up(), make_seeds
)
