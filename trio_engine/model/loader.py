"""Opens a checkpoint of either kind behind one face.

Layer: model. Nothing is read but headers until ``tensors`` is iterated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from trio_engine.checkpoint import ModelFiles
    from trio_engine.model.config import ModelConfig


class Checkpoint(Protocol):
    """A checkpoint whose headers were read and found to match its configuration.

    Attributes:
        config: the decoder that it holds the weights of.
        num_bytes: of all tensors that ``tensors`` yields, as stored; for progress.
    """

    @property
    def config(self) -> ModelConfig: ...

    @property
    def num_bytes(self) -> int: ...

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields each weight under its Hugging Face name, exactly once, in the file's order.

        Each is a fresh contiguous CPU tensor that the caller may keep or change: in the stored
        type, or float32 where that is quantized. Besides the tensor in the caller's hands only a
        chunk of about a megabyte is alive. ``lm_head.weight`` is not among them if the embeddings
        are tied.

        Raises:
            ModelError: a file cannot be read, or has changed since it was opened.
        """
        ...


def open_checkpoint(files: ModelFiles) -> Checkpoint:
    """Reads configuration and headers, and checks every tensor's presence, shape and type.

    Raises:
        ModelError: missing, damaged or unsupported; names the file and what is wrong with it.
    """
    if files.kind == "gguf":
        from trio_engine.model.gguf_loader import GGUFCheckpoint

        return GGUFCheckpoint(files.path)
    from trio_engine.model.safetensors_loader import SafetensorsCheckpoint

    return SafetensorsCheckpoint(files.path)
