"""``python -m trio_engine.structured.trial``: compiles grammars where that can do no harm.

Entry. The library may overflow the stack of its thread, take all memory or all time, and a thread
cannot be stopped. This process can: whoever started it ends it after a while, and what it has
compiled another may compile too. Here memory has a limit, and the stack is half of what a thread
there has. It reads jobs from its standard input and ends with it, also in the middle of one.
"""

from __future__ import annotations

import os
import queue
import resource
import sys
import threading
from typing import BinaryIO

import msgspec
import numpy as np

from trio_engine.errors import EngineError, RequestError
from trio_engine.structured.compiler import GrammarCompiler
from trio_engine.structured.lark import OPTIONS
from trio_engine.structured.matcher import num_mask_words
from trio_engine.structured.vocabulary import Vocabulary

LENGTH_BYTES = 4
MEMORY_BYTES = 256 << 20
"""That compiling one grammar may take. Honest ones of 100,000 bytes took 40 MB."""

UNLIMITED_STACK_BYTES = 2 << 20
"""Of a thread, by the C library's rule where processes have no limit."""

TOO_MUCH_MEMORY = f"compiling it takes more than {MEMORY_BYTES >> 20} MB"


def frame(message: bytes) -> bytes:
    """A message as it goes through a pipe."""
    return len(message).to_bytes(LENGTH_BYTES, "little") + message


def try_grammar(compiler: GrammarCompiler, vocab_size: int, source: str) -> str:
    """Compiles a source and finds its first mask; returns why that fails, or nothing."""
    try:
        matcher = compiler.compile(source).start([], [0])
        matcher.fill(np.empty(num_mask_words(vocab_size), dtype=np.uint32))
    except RequestError as error:
        return str(error)
    except MemoryError:
        return TOO_MUCH_MEMORY
    return matcher.failure or ""


def main() -> None:
    """Answers the vocabulary and then each source by a message: empty, or why not."""
    _halve_stack()
    # An end that is foreseen leaves no file behind.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    jobs: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_serve, args=(jobs, sys.stdout.buffer), daemon=True).start()
    while (message := _read(sys.stdin.buffer)) is not None:
        jobs.put(message)
    # At once: the thread may be deep in a job that nobody waits for any more.
    os._exit(0)


def _serve(jobs: queue.SimpleQueue[bytes], answers: BinaryIO) -> None:
    try:
        vocabulary = msgspec.msgpack.decode(jobs.get(), type=Vocabulary)
        vocab_size = len(vocabulary.tokens)
        compiler = GrammarCompiler(vocabulary)
        # Once without a limit: what this thread and the library always hold is no grammar's.
        _answer(answers, try_grammar(compiler, vocab_size, f'start: "a"\n{OPTIONS}'))
        while True:
            source = jobs.get().decode()
            _limit_memory()
            _answer(answers, try_grammar(compiler, vocab_size, source))
    except EngineError as error:
        _answer(answers, str(error))
    finally:
        os._exit(1)


def _read(stream: BinaryIO) -> bytes | None:
    length = stream.read(LENGTH_BYTES)
    message = stream.read(int.from_bytes(length, "little")) if len(length) == LENGTH_BYTES else b""
    return message or None


def _answer(stream: BinaryIO, text: str) -> None:
    stream.write(frame(text.encode()))
    stream.flush()


def _halve_stack() -> None:
    stack_bytes, _ = resource.getrlimit(resource.RLIMIT_STACK)
    if stack_bytes == resource.RLIM_INFINITY:
        stack_bytes = UNLIMITED_STACK_BYTES
    page = resource.getpagesize()
    threading.stack_size(stack_bytes // 2 // page * page)


def _limit_memory() -> None:
    """Beyond the limit Python raises an error, and the library ends the process.

    Only Linux counts what is allocated; elsewhere time is the only limit.
    """
    if sys.platform != "linux":
        return
    with open("/proc/self/status") as file:
        lines = dict(line.split(":", 1) for line in file)
    used_bytes = int(lines["VmData"].split()[0]) << 10
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (used_bytes + MEMORY_BYTES, hard))


if __name__ == "__main__":
    main()
