"""One decoder for Llama, Mistral, Qwen2 and Qwen3, which differ only by configuration.

Layer: model. Computes; what is computed and where its KV goes is in the ``Batch``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from trio_engine.model.attention import attend
from trio_engine.model.linear import linear
from trio_engine.model.lora import add_lora
from trio_engine.model.rope import RotaryEmbedding, Rotation, rotate_

if TYPE_CHECKING:
    from torch import Tensor

    from trio_engine.model.batch import Batch
    from trio_engine.model.config import ModelConfig
    from trio_engine.model.kv_cache import KVCache
    from trio_engine.model.weights import DecoderWeights, LayerWeights


class Decoder:
    """A decoder-only transformer over a paged KV cache.

    Call it under ``torch.inference_mode``.

    Args:
        config: shape and constants.
        weights: loaded for it; their type and device are the decoder's.

    Attributes:
        config: as given.
        device: where weights, batches and KV cache live.
        dtype: of weights and KV cache.
    """

    def __init__(self, config: ModelConfig, weights: DecoderWeights) -> None:
        self.config = config
        self.device = weights.embedding.device
        self.dtype = weights.embedding.dtype
        self._weights = weights
        self._rope = RotaryEmbedding(config.rope, config.head_dim, self.device, self.dtype)
        self._num_query_key_heads = config.num_heads + config.num_kv_heads
        # For float32 on CPU: of half types torch's own norm keeps more digits than they have, and
        # on CUDA it is one kernel.
        self._rms_norm_eps: Tensor | None = None
        if self.dtype is torch.float32 and self.device.type == "cpu":
            self._rms_norm_eps = torch.tensor([config.rms_norm_eps], device=self.device)

    def release_weights(self) -> None:
        """Lets go of the weights. Only ``restore_weights`` may follow."""
        del self._weights

    def restore_weights(self, weights: DecoderWeights) -> None:
        """Takes weights of the same configuration, type and device as at first."""
        self._weights = weights

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        """Computes a batch, and writes its keys and values.

        Args:
            batch: tokens, positions and KV slots.
            cache: holds the KV of every earlier token of each row.

        Returns:
            ``[num_tokens, hidden]``, what the last layer made of each token.
        """
        hidden = functional.embedding(batch.token_ids, self._weights.embedding)
        if batch.embeds is not None:
            hidden.index_copy_(0, batch.embeds.indices, batch.embeds.values)
        rotation = self._rope.rotation(batch.positions)
        for index, layer in enumerate(self._weights.layers):
            hidden += self._attention(index, layer, hidden, rotation, batch, cache)
            hidden += self._mlp(index, layer, hidden, batch)
        return hidden

    def score(self, hidden: Tensor) -> Tensor:
        """Scores what follows each of some tokens.

        Args:
            hidden: ``[n, hidden]`` out of ``forward``.

        Returns:
            Logits ``[n, vocab]`` float32, contiguous.
        """
        return linear(self._norm(hidden, self._weights.final_norm), self._weights.head).float()

    def _attention(
        self,
        index: int,
        layer: LayerWeights,
        hidden: Tensor,
        rotation: Rotation,
        batch: Batch,
        cache: KVCache,
    ) -> Tensor:
        config = self.config
        normed = self._norm(hidden, layer.input_norm)
        heads = linear(normed, layer.qkv, layer.qkv_bias)
        heads = add_lora(heads, normed, batch.lora, index, "qkv")
        heads = heads.view(hidden.shape[0], -1, config.head_dim)
        queries_keys = heads[:, : self._num_query_key_heads]
        if layer.qk_norm is not None:
            queries_keys.copy_(self._norm(queries_keys).mul_(layer.qk_norm))
        rotate_(queries_keys, rotation)
        queries, keys_values = heads.split_with_sizes(
            [config.num_heads, 2 * config.num_kv_heads], dim=1
        )
        keys_values = keys_values.view(hidden.shape[0], 2, config.num_kv_heads, -1)
        cache.write(index, batch.slots, keys_values)
        view = batch.sliding if config.layer_is_sliding[index] else batch.full
        attended = attend(queries, keys_values, cache, index, view)
        out = linear(attended, layer.out, layer.out_bias)
        return add_lora(out, attended, batch.lora, index, "out")

    def _mlp(self, index: int, layer: LayerWeights, hidden: Tensor, batch: Batch) -> Tensor:
        normed = self._norm(hidden, layer.post_norm)
        gate_up = linear(normed, layer.gate_up, layer.gate_up_bias)
        gate_up = add_lora(gate_up, normed, batch.lora, index, "gate_up")
        half = gate_up.shape[1] // 2
        gate, up = gate_up.split_with_sizes([half, half], dim=1)
        gated = functional.silu(gate).mul_(up)
        out = linear(gated, layer.down, layer.down_bias)
        return add_lora(out, gated, batch.lora, index, "down")

    def _norm(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        if self._rms_norm_eps is None:
            return functional.rms_norm(x, x.shape[-1:], weight, self.config.rms_norm_eps)
        # The same in half as many passes, which cost a lone row more than their arithmetic.
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        mean_square = torch.addcmul(self._rms_norm_eps, length, length, value=1 / x.shape[-1])
        normed = x * mean_square.rsqrt_()
        return normed if weight is None else normed.mul_(weight)
