"""Gives a model's memory back while the engine sleeps, and takes it again.

Layer: model. Nothing is moved aside: the KV cache is computed again, weights are read again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trio_engine.errors import ModelError, UtilityError
from trio_engine.model.device import out_of_memory_as, return_freed_memory
from trio_engine.model.loader import open_checkpoint
from trio_engine.model.weights import load_weights
from trio_engine.requests import SleepTag

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trio_engine.checkpoint import ModelFiles
    from trio_engine.model.decoder import Decoder
    from trio_engine.model.kv_cache import KVCache
    from trio_engine.model.weights import WeightForm


class ModelMemory:
    """The weights and the KV cache of one model.

    Args:
        files: what the weights were read from.
        decoder: holds the weights.
        cache: the KV cache.
        form: of the weights.

    Attributes:
        asleep: what is given back now; meanwhile the model must not run.
    """

    def __init__(
        self,
        files: ModelFiles,
        decoder: Decoder,
        cache: KVCache,
        form: WeightForm,
    ) -> None:
        self.asleep: set[SleepTag] = set()
        self._files = files
        self._decoder = decoder
        self._cache = cache
        self._form = form

    def release(self, tags: Iterable[str]) -> None:
        """Gives memory back; what sleeps already is left alone."""
        for tag in _memory_tags(tags) - self.asleep:
            if tag is SleepTag.WEIGHTS:
                self._decoder.release_weights()
            else:
                self._cache.release()
            self.asleep.add(tag)
        return_freed_memory(self._decoder.device)

    def restore(self, tags: Iterable[str]) -> None:
        """Takes memory again: the weights as they are in the checkpoint, an empty KV cache.

        Raises:
            ModelError: the checkpoint is gone, damaged, or another model's by now.
            UtilityError: memory ran out. As before, what could not be taken stays asleep.
        """
        # Weights first, as in a load: reading them takes room beside them for a moment.
        try:
            for tag in sorted(_memory_tags(tags) & self.asleep, reverse=True):
                with out_of_memory_as(UtilityError, f"waking up {tag.value}"):
                    self._restore(tag)
                self.asleep.remove(tag)
        finally:  # what was made in vain must not lack at the next try
            return_freed_memory(self._decoder.device)

    def _restore(self, tag: SleepTag) -> None:
        if tag is SleepTag.WEIGHTS:
            self._reload_weights()
        else:
            self._cache.allocate()

    def _reload_weights(self) -> None:
        decoder = self._decoder
        checkpoint = open_checkpoint(self._files)
        if checkpoint.config != decoder.config:
            raise ModelError(f"{self._files.path}: the model there has changed since it was loaded")
        weights = self._form.apply(
            load_weights(checkpoint.config, checkpoint.tensors(), decoder.dtype, decoder.device)
        )
        decoder.restore_weights(weights)


def _memory_tags(tags: Iterable[str]) -> set[SleepTag]:
    return {SleepTag(tag) for tag in tags}
