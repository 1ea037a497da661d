"""A prompt that is not text: embeddings, alone or among token ids.

Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from trio_engine.errors import RequestError
from trio_engine.tensors import TensorData

if TYPE_CHECKING:
    from trio_engine.text.settle import RequestLimits


class EmbedsPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """Embeddings in place of a prompt's tokens.

    A vLLM engine takes them only if it was started with ``--enable-prompt-embeds``.

    Attributes:
        embeds: ``[num_tokens, hidden]`` of the model's hidden size; a numpy array, which is copied,
            or a ``TensorData`` of float32, bfloat16 or float16.
        token_ids: for a prompt of both kinds, an id for each position.
        is_token_ids: and at which positions it is the id that counts.
    """

    embeds: TensorData | np.ndarray[Any, Any]
    token_ids: list[int] | None = None
    is_token_ids: list[bool] | None = None

    def to_tensor(self) -> TensorData:
        """The embeddings as they are sent.

        Raises:
            RequestError: they are no array of two dimensions, or of no floats that are sent.
        """
        embeds = self.embeds
        if isinstance(embeds, np.ndarray):
            if embeds.dtype not in (np.float32, np.float16):
                raise RequestError(f"embeds must be float32 or float16, got {embeds.dtype}")
            embeds = TensorData.from_numpy(embeds.copy())
        if len(embeds.shape) != 2:
            raise RequestError(
                f"embeds must have the shape [num_tokens, hidden], got {list(embeds.shape)}"
            )
        return embeds

    def check(self, num_tokens: int, limits: RequestLimits) -> None:
        """Refuses lists that do not fit the embeddings.

        Raises:
            RequestError: names the field and its value.
        """
        ids, is_ids = self.token_ids, self.is_token_ids
        if ids is None and is_ids is None:
            return
        for name, values in (("token_ids", ids), ("is_token_ids", is_ids)):
            found = None if values is None else len(values)
            if found != num_tokens:
                raise RequestError(f"{name} must be {num_tokens}, as many as embeds, got {found}")
        assert ids is not None
        limits.check_token_ids("token_ids", ids)
