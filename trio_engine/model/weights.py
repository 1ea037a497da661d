"""The tensors of a decoder, fused where one product can do the work of several.

Layer: model. Knows Hugging Face's names, and no file format.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from trio_engine.config import LinearBackendName, QuantizationName
from trio_engine.errors import ModelError
from trio_engine.model.device import return_freed_memory
from trio_engine.model.linear_backend import in_form_of
from trio_engine.model.quantization import quantize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from trio_engine.model.config import ModelConfig
    from trio_engine.model.matrix import Matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer's tensors; matrices are ``[out, in]``.

    Attributes:
        input_norm: ``[hidden]``, before attention.
        qkv: ``[(num_heads + 2 * num_kv_heads) * head_dim, hidden]``: queries, keys, values.
        qkv_bias: ``[out]`` or None, as the other biases.
        qk_norm: ``[num_heads + num_kv_heads, head_dim]`` or None: q's and k's norm, once per head.
        out: ``[hidden, num_heads * head_dim]``.
        post_norm: ``[hidden]``, before the MLP.
        gate_up: ``[2 * intermediate, hidden]``: gate, then up.
        down: ``[hidden, intermediate]``.
    """

    input_norm: Tensor
    qkv: Matrix
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    out: Matrix
    out_bias: Tensor | None
    post_norm: Tensor
    gate_up: Matrix
    gate_up_bias: Tensor | None
    down: Matrix
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """All tensors of a decoder.

    Attributes:
        embedding: ``[vocab, hidden]``.
        layers: first to last.
        final_norm: ``[hidden]``.
        head: ``[vocab, hidden]``; the same tensor as ``embedding`` where they are tied and both
            are tensors.
    """

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Matrix


class _Place(NamedTuple):
    """Where a checkpoint's tensor goes: ``shape`` is what it must have, ``into`` may broadcast."""

    into: Tensor
    shape: tuple[int, ...]


class _Allocator:
    """Allocates parameters and notes which checkpoint tensor fills which part of them."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._config = config
        self._dtype = dtype
        self._device = device
        self.places: dict[str, _Place] = {}

    def decoder(self) -> DecoderWeights:
        config = self._config
        embedding = self._single("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        layers = tuple(self._layer(f"model.layers.{i}.") for i in range(config.num_layers))
        final_norm = self._single("model.norm.weight", config.hidden_size)
        head = embedding
        if not config.tie_word_embeddings:
            head = self._single("lm_head.weight", config.vocab_size, config.hidden_size)
        return DecoderWeights(embedding=embedding, layers=layers, final_norm=final_norm, head=head)

    def _layer(self, prefix: str) -> LayerWeights:
        config = self._config
        hidden, intermediate = config.hidden_size, config.intermediate_size
        queries = config.num_heads * config.head_dim
        keys = config.num_kv_heads * config.head_dim
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        qkv = {f"{attention}{p}_proj": n for p, n in (("q", queries), ("k", keys), ("v", keys))}
        gate_up = {f"{mlp}{p}_proj": intermediate for p in ("gate", "up")}
        out, down = {f"{attention}o_proj": hidden}, {f"{mlp}down_proj": hidden}
        return LayerWeights(
            input_norm=self._single(f"{prefix}input_layernorm.weight", hidden),
            qkv=self._matrix(qkv, hidden),
            qkv_bias=self._bias(qkv, wanted=config.attention_bias),
            qk_norm=self._qk_norm(attention) if config.qk_norm else None,
            out=self._matrix(out, queries),
            out_bias=self._bias(out, wanted=config.attention_out_bias),
            post_norm=self._single(f"{prefix}post_attention_layernorm.weight", hidden),
            gate_up=self._matrix(gate_up, hidden),
            gate_up_bias=self._bias(gate_up, wanted=config.mlp_bias),
            down=self._matrix(down, intermediate),
            down_bias=self._bias(down, wanted=config.mlp_bias),
        )

    def _single(self, name: str, *shape: int) -> Tensor:
        parameter = self._empty(*shape)
        self.places[name] = _Place(parameter, shape)
        return parameter

    def _matrix(self, parts: dict[str, int], in_size: int) -> Tensor:
        parameter = self._empty(sum(parts.values()), in_size)
        for name, part in zip(parts, parameter.split_with_sizes(list(parts.values())), strict=True):
            self.places[f"{name}.weight"] = _Place(part, tuple(part.shape))
        return parameter

    def _bias(self, parts: dict[str, int], *, wanted: bool) -> Tensor | None:
        if not wanted:
            return None
        parameter = self._empty(sum(parts.values()))
        for name, part in zip(parts, parameter.split_with_sizes(list(parts.values())), strict=True):
            self.places[f"{name}.bias"] = _Place(part, tuple(part.shape))
        return parameter

    def _qk_norm(self, prefix: str) -> Tensor:
        config = self._config
        heads = {"q": config.num_heads, "k": config.num_kv_heads}
        parameter = self._empty(sum(heads.values()), config.head_dim)
        for name, part in zip(heads, parameter.split_with_sizes(list(heads.values())), strict=True):
            self.places[f"{prefix}{name}_norm.weight"] = _Place(part, (config.head_dim,))
        return parameter

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(*shape, dtype=self._dtype, device=self._device)


def load_weights(
    config: ModelConfig,
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    device: torch.device,
    on_progress: Callable[[float], None] = lambda _share: None,
) -> DecoderWeights:
    """Copies a checkpoint's tensors, one at a time, to where a decoder wants them.

    Beside the parameters only the tensor at hand is alive, and at most one converted copy of it.

    Args:
        config: of the checkpoint.
        tensors: Hugging Face names and tensors, each at most once.
        dtype: of the parameters.
        device: of the parameters.
        on_progress: told the share that is loaded, in (0, 1], after each tensor.

    Raises:
        ModelError: a tensor is missing, twice there, not known, or of another shape; by name.
    """
    allocator = _Allocator(config, dtype, device)
    weights = allocator.decoder()
    places = allocator.places
    total = sum(place.into.numel() for place in places.values())
    num_loaded = 0
    for name, tensor in tensors:
        place = places.pop(name, None)
        if place is None:
            raise ModelError(f"tensor {name}: not known to {config.architecture}, or twice there")
        if tuple(tensor.shape) != place.shape:
            expected = list(place.shape)
            raise ModelError(f"tensor {name}: shape {list(tensor.shape)}, expected {expected}")
        place.into.copy_(tensor)
        num_loaded += place.into.numel()
        on_progress(num_loaded / total)
    if places:
        names = ", ".join(sorted(places)[:3])
        raise ModelError(f"{len(places)} tensors are missing, among them {names}")
    return weights


class WeightForm(NamedTuple):
    """In which form a decoder keeps the matrices of its linear layers.

    Attributes:
        quantization: None leaves them as floats.
        linear_backend: of those that are floats; not ``auto``.
    """

    quantization: QuantizationName | None = None
    linear_backend: LinearBackendName = "torch"

    def apply(self, weights: DecoderWeights) -> DecoderWeights:
        """Brings matrices into this form, one after the other.

        A quantized head is int8 in either case: as int4 it would make up nearly all of a model's
        error. A tied head becomes a copy if its form is another, and the embedding stays as it is.

        Args:
            weights: as loaded. If nobody else holds them, each matrix goes as soon as its new form
                is there.

        Raises:
            ModelError: a matrix that is to be quantized has weights that are not finite; it says
                which.
        """
        if self == WeightForm():
            return weights
        embedding, final_norm, head = weights.embedding, weights.final_norm, weights.head
        layers = list(weights.layers)
        del weights
        for index in range(len(layers)):
            layers[index] = self._layer(index, layers[index])
            # A packed matrix is allocated 2 to 9 times as large as what it fills. In the place of
            # freed ones all of it would count as used, had their pages not been given back.
            return_freed_memory(embedding.device)
        return DecoderWeights(
            embedding=embedding,
            layers=tuple(layers),
            final_norm=final_norm,
            head=self._matrix("the head", head, self.quantization and "int8"),
        )

    def _layer(self, index: int, layer: LayerWeights) -> LayerWeights:
        return replace(
            layer,
            qkv=self._matrix(f"qkv of layer {index}", layer.qkv, self.quantization),
            out=self._matrix(f"out of layer {index}", layer.out, self.quantization),
            gate_up=self._matrix(f"gate_up of layer {index}", layer.gate_up, self.quantization),
            down=self._matrix(f"down of layer {index}", layer.down, self.quantization),
        )

    def _matrix(self, name: str, matrix: Matrix, quantization: QuantizationName | None) -> Matrix:
        if not isinstance(matrix, Tensor):
            return matrix
        if quantization is None:
            return in_form_of(self.linear_backend, matrix)
        try:
            return quantize(matrix, quantization)
        except ModelError as error:
            raise ModelError(f"cannot quantize {name}: {error}") from error
