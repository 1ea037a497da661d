"""Loads a model's tokenizer in a thread while its engine starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from trio_engine.text.tokenizer import Tokenizer


class TokenizerLoad:
    """One load: ``run`` is a task's, ``wait_loaded`` anybody's.

    Args:
        model: as in ``EngineConfig``; None loads nothing.
        tokenizer: the result where nothing is loaded.
    """

    def __init__(self, model: str | None, tokenizer: Tokenizer | None = None) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._failure: Exception | None = None
        self._done = trio.Event()

    async def run(self) -> None:
        """Loads. Cancellation: the thread is left behind; it only reads files."""
        try:
            if self._model is not None:
                self._tokenizer = await trio.to_thread.run_sync(
                    _load, self._model, abandon_on_cancel=True
                )
        except Exception as error:  # raised where the tokenizer is wanted
            self._failure = error
        finally:
            self._done.set()

    async def wait_loaded(self) -> Tokenizer | None:
        """The tokenizer, or None if there is none.

        Raises:
            ModelError: it cannot be loaded.
        """
        await self._done.wait()
        if self._failure is not None:
            raise self._failure
        return self._tokenizer


def _load(model: str) -> Tokenizer:
    # Imported on the thread: they take longer than the files do.
    from trio_engine.checkpoint import locate_model
    from trio_engine.text.tokenizer import load_tokenizer

    return load_tokenizer(locate_model(model))
