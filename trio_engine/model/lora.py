"""Low-rank adapters beside the linear layers, several of them in one batch.

Layer: model. An adapter adds ``x @ a.T @ b.T`` to what a linear layer makes of the tokens of its
own rows (Hu et al., "LoRA", https://arxiv.org/abs/2106.09685); no other token is touched, so what
the base model says beside it is the same to the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import numpy as np
from torch import Tensor
from torch.nn import functional

from trio_engine.errors import RequestError
from trio_engine.model.device import to_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from numpy.typing import NDArray

LoRASite: TypeAlias = Literal["qkv", "out", "gate_up", "down"]
"""A linear layer of the decoder, named as in ``LayerWeights``."""


class LoRAMatrices(NamedTuple):
    """What an adapter adds at one site: ``a`` ``[rank, in]``, ``b`` ``[out, rank]``, scaled.

    Of a fused site the rank is the sum of its parts' ranks and ``b`` is block-diagonal.
    """

    a: Tensor
    b: Tensor


@dataclass(frozen=True, slots=True)
class LoRAAdapter:
    """One adapter on the model's device.

    Attributes:
        lora_id: 1 or more; 0 is the base model.
        layers: for each layer of the decoder, its matrices by site; sites that the adapter leaves
            alone are not there.
    """

    lora_id: int
    layers: tuple[dict[LoRASite, LoRAMatrices], ...]


class LoRATokens(NamedTuple):
    """The tokens of a batch that one adapter concerns: ``token_indices`` ``[n]`` int64."""

    adapter: LoRAAdapter
    token_indices: Tensor


def add_lora(
    out: Tensor, x: Tensor, tokens: Sequence[LoRATokens], layer: int, site: LoRASite
) -> Tensor:
    """Adds to a linear layer's output what adapters make of their tokens.

    Args:
        out: ``[num_tokens, out]``, changed in place.
        x: ``[num_tokens, in]``, what the layer was given.
        tokens: of the batch; empty for a batch without adapters.
        layer: index of the decoder's layer.
        site: which of its linear layers.

    Returns:
        ``out``.
    """
    for adapter, indices in tokens:
        matrices = adapter.layers[layer].get(site)
        if matrices is not None:
            inner = functional.linear(x.index_select(0, indices), matrices.a)
            out.index_add_(0, indices, functional.linear(inner, matrices.b))
    return out


class LoRAAdapters:
    """The adapters that a model holds, by id.

    Which are held, and when one may go, is the core's to decide.
    """

    def __init__(self) -> None:
        self._adapters: dict[int, LoRAAdapter] = {}

    def __contains__(self, lora_id: int) -> bool:
        return lora_id in self._adapters

    def add(self, adapter: LoRAAdapter) -> None:
        """Takes an adapter in, in place of one of the same id."""
        self._adapters[adapter.lora_id] = adapter

    def remove(self, lora_id: int) -> None:
        """Lets go of an adapter.

        Raises:
            RequestError: there is none of this id.
        """
        if self._adapters.pop(lora_id, None) is None:
            raise RequestError(f"the model holds no adapter {lora_id}")

    def tokens_of(
        self, token_lora_ids: NDArray[np.int64], device: torch.device
    ) -> tuple[LoRATokens, ...]:
        """Sorts a batch's tokens by adapter.

        Args:
            token_lora_ids: ``[num_tokens]``: each token's adapter, 0 for none.
            device: of the batch.
        """
        if not token_lora_ids.any():
            return ()
        return tuple(
            LoRATokens(
                self._adapters[lora_id],
                to_device(np.flatnonzero(token_lora_ids == lora_id), device),
            )
            for lora_id in np.unique(token_lora_ids).tolist()
            if lora_id
        )
