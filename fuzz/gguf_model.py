"""Any GGUF file opens as a model and gives its tensors, or raises ModelError by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from fuzz.hf_config import check_usable
from fuzz.model_inputs import folder_of, gguf_file
from fuzz.target import Target
from fuzz.wire_inputs import changed_frames
from trio_engine.errors import ModelError
from trio_engine.gguf_metadata import read_gguf, read_gguf_metadata

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "general.alignment": 32,
    "llama.context_length": 16,
    "llama.embedding_length": 4,
    "llama.block_count": 1,
    "llama.feed_forward_length": 4,
    "llama.attention.head_count": 2,
    "llama.attention.head_count_kv": 1,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}
_ROPES: list[dict[str, Any]] = [
    {},
    {"llama.rope.scale_linear": 2.0},
    {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0},
]
_TENSORS = {
    "token_embd.weight": (4, 4),
    "output_norm.weight": (4,),
    "blk.0.attn_norm.weight": (4,),
    "blk.0.ffn_norm.weight": (4,),
    "blk.0.attn_q.weight": (4, 4),
    "blk.0.attn_k.weight": (2, 4),
    "blk.0.attn_v.weight": (2, 4),
    "blk.0.attn_output.weight": (4, 4),
    "blk.0.ffn_gate.weight": (4, 4),
    "blk.0.ffn_up.weight": (4, 4),
    "blk.0.ffn_down.weight": (4, 4),
}


def check(data: bytes) -> bool:
    with folder_of({"model.gguf": data}) as folder:
        path = folder / "model.gguf"
        try:
            file = read_gguf(path)
            assert read_gguf_metadata(path).keys() == file.metadata.keys()
            for tensor in file.tensors:
                assert 0 <= tensor.offset <= tensor.offset + tensor.num_bytes <= len(data)
            return _is_read_whole(path)
        except ModelError as error:
            assert str(error).startswith(str(path))
            return False


def _is_read_whole(path: Path) -> bool:
    # Here and not above: this imports torch, which the other targets do without.
    from trio_engine.model.gguf_loader import GGUFCheckpoint

    checkpoint = GGUFCheckpoint(path)
    check_usable(checkpoint.config)
    for _, tensor in checkpoint.tensors():
        assert tensor.is_contiguous()
    return True


def make_seeds() -> Iterator[bytes]:
    for rope in _ROPES:
        yield gguf_file(_METADATA | rope, _TENSORS)
    heads = {"blk.0.attn_q_norm.weight": (2,), "blk.0.attn_k_norm.weight": (2,)}
    qwen3 = {key.replace("llama.", "qwen3."): value for key, value in _METADATA.items()}
    yield gguf_file(qwen3 | {"general.architecture": "qwen3"}, _TENSORS | heads)


def _changed_seeds() -> st.SearchStrategy[bytes]:
    seeds = st.sampled_from(list(make_seeds()))
    return seeds.flatmap(lambda seed: changed_frames([seed])).map(lambda frames: frames[0])


@st.composite
def _made_up(draw: st.DrawFn) -> bytes:
    metadata = _METADATA | draw(st.sampled_from(_ROPES))
    scalars = st.integers(0, 2**32 - 1) | st.floats(width=32) | st.booleans() | st.text(max_size=5)
    values = scalars | st.lists(st.integers(0, 5), min_size=1, max_size=3)
    for key in draw(st.lists(st.sampled_from(sorted(metadata)), max_size=2)):
        metadata[key] = draw(values)
    return gguf_file(metadata, _TENSORS)


TARGET = Target(
    "gguf_model",
    __doc__,
    check,
    st.binary(max_size=200).map(lambda data: b"GGUF\3\0\0\0" + data)
    | _changed_seeds()
    | _made_up(),
    make_seeds,
)
