"""Compiles a grammar so that it can do no harm: tried in a process first, then in a thread.

Engine. What the library does with a hostile source has no bound in time, memory or stack, and only
a process can be ended. A thread has to do once more what a process has done, as a grammar cannot be
handed over; it is known then that it can.
"""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING, TypeVar

import trio

from trio_engine.engine.abandonable_threads import AbandonableThreads
from trio_engine.engine.grammar_trial import TrialProcess
from trio_engine.errors import ModelError, RequestError
from trio_engine.structured.compiler import GrammarCompiler
from trio_engine.structured.source import grammar_source
from trio_engine.structured.vocabulary import Vocabulary, load_vocabulary

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio_engine.config import EngineConfig
    from trio_engine.sampling_params import StructuredOutputsParams
    from trio_engine.structured.compiler import Grammar

    T = TypeVar("T")

MAX_ABANDONED_THREADS = 8
"""Each of them has to do what a process has done within ``grammar_timeout_s``."""

MAX_KNOWN_SOURCES = 1024
"""Remembered as good by their hash: what comes again need not be tried again."""

KEEP_TRIAL_S = 0.5
"""A trial that took longer has left much memory in its process, which is not used again."""


class GuardedCompiler:
    """Compiles grammars for one engine. Any number of tasks may call ``compile``.

    Args:
        config: its tokenizer, and limits of grammars.
        vocab_size: tokens that the executor samples from.
    """

    def __init__(self, config: EngineConfig, vocab_size: int) -> None:
        self._config = config
        self._vocab_size = vocab_size
        self._threads = AbandonableThreads(MAX_ABANDONED_THREADS)
        # What is loaded for the first request.
        self._loading = trio.Lock()
        self._vocabulary: Vocabulary | None = None
        self._compiler: GrammarCompiler | None = None
        self._why_not_loaded: str | None = None
        self._known: dict[bytes, None] = {}
        self._idle_trial: TrialProcess | None = None
        self._is_closed = False

    @property
    def num_abandoned_threads(self) -> int:
        """Threads that compile for nobody any more."""
        return self._threads.num_abandoned

    async def compile(self, params: StructuredOutputsParams) -> Grammar:
        """Compiles what a request asks for.

        Raises:
            RequestError: it is no grammar, is too large, or takes too much time or memory.
            ModelError: there are no grammars for this model, or no process for trials.
            OverloadedError: too many threads compile for nobody any more.

        Cancellation: at once. A process is ended; a thread goes on and is counted.
        """
        vocabulary, compiler = await self._loaded()
        source = await self._in_time(
            grammar_source, params, vocabulary, self._config.max_grammar_bytes
        )
        key = hashlib.sha256(source.encode()).digest()
        if key not in self._known:
            await self._try(source, vocabulary)
            self._remember(key)
        return await self._in_time(compiler.compile, source)

    async def aclose(self) -> None:
        """Ends the process that waits for the next trial; later ones end after their job.

        Cancellation: as ``TrialProcess.aclose``.
        """
        self._is_closed = True
        trial, self._idle_trial = self._idle_trial, None
        if trial is not None:
            await trial.aclose()

    async def _loaded(self) -> tuple[Vocabulary, GrammarCompiler]:
        async with self._loading:
            if self._why_not_loaded is not None:
                raise ModelError(self._why_not_loaded)
            if self._vocabulary is None or self._compiler is None:
                try:
                    await self._load()
                except ModelError as error:
                    self._why_not_loaded = str(error)
                    raise
        return self._vocabulary, self._compiler
