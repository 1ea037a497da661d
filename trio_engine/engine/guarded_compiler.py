"""Compiles a grammar so that it can do no harm: tried in a process first, then in a thread.

Engine. What the library does with a hostile source has no bound in time, memory or stack, and only
a process can be ended. A thread has to do once more what a process has done, as a grammar cannot be
handed over; by then it is known that it can be done.
"""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING, NamedTuple, TypeVar

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
"""Each has to do what a process has done within ``grammar_timeout_s``, so none stays for long."""

MAX_KNOWN_SOURCES = 1024
"""Remembered as good by their hash: what comes again need not be tried again."""

KEEP_TRIAL_S = 0.5
"""A trial that took longer has left much memory in its process, which gets no other one."""


class _Tools(NamedTuple):
    vocabulary: Vocabulary
    compiler: GrammarCompiler


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
        self._loading = trio.Lock()
        # Loaded for the first request: most engines never need it.
        self._tools: _Tools | None = None
        self._why_no_tools: str | None = None
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
            RequestError: it is no grammar, too large, or takes too much time or memory.
            ModelError: there are no grammars for this model, or no process for trials.
            OverloadedError: too many threads compile for nobody.

        Cancellation: at once. A process is ended; a thread goes on, and is counted.
        """
        tools = await self._load()
        source = await self._in_time(
            grammar_source, params, tools.vocabulary, self._config.max_grammar_bytes
        )
        key = hashlib.sha256(source.encode()).digest()
        if key not in self._known:
            await self._try(source, tools.vocabulary)
            self._note_known(key)
        return await self._in_time(tools.compiler.compile, source)

    async def aclose(self) -> None:
        """Ends the process that waits for a trial; others end when theirs is over or cancelled."""
        self._is_closed = True
        trial, self._idle_trial = self._idle_trial, None
        if trial is not None:
            await trial.aclose()

    async def _load(self) -> _Tools:
        async with self._loading:
            if self._tools is None:
                if self._why_no_tools is not None:
                    raise ModelError(self._why_no_tools)
                try:
                    self._tools = await self._threads.run_sync(
                        _load_tools, self._config.tokenizer_model, self._vocab_size
                    )
                except ModelError as error:
                    self._why_no_tools = str(error)
                    raise
        return self._tools

    async def _in_time(self, function: Callable[..., T], *args: object) -> T:
        with trio.move_on_after(self._config.grammar_timeout_s):
            return await self._threads.run_sync(function, *args)
        raise self._too_slow()

    async def _try(self, source: str, vocabulary: Vocabulary) -> None:
        trial = await self._take_trial(vocabulary)
        started_s = time.monotonic()
        why: str | None = None
        took_s = float("inf")
        try:
            with trio.move_on_after(self._config.grammar_timeout_s):
                why = await trial.try_grammar(source)
                took_s = time.monotonic() - started_s
        finally:
            if took_s > KEEP_TRIAL_S or self._idle_trial is not None or self._is_closed:
                await trial.aclose()
            else:
                self._idle_trial = trial
        if why is None:
            raise self._too_slow()
        if why:
            raise RequestError(why)

    async def _take_trial(self, vocabulary: Vocabulary) -> TrialProcess:
        trial, self._idle_trial = self._idle_trial, None
        if trial is not None and trial.is_alive:
            return trial
        if trial is not None:
            await trial.aclose()
        return await TrialProcess.start(vocabulary)

    def _note_known(self, key: bytes) -> None:
        self._known[key] = None
        if len(self._known) > MAX_KNOWN_SOURCES:
            del self._known[next(iter(self._known))]

    def _too_slow(self) -> RequestError:
        return RequestError(f"compiling it takes more than {self._config.grammar_timeout_s:g} s")


def _load_tools(model: str | None, vocab_size: int) -> _Tools:
    vocabulary = load_vocabulary(model, vocab_size)
    return _Tools(vocabulary, GrammarCompiler(vocabulary))
