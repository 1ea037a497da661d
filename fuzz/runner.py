"""Runs targets on their seeds, on changed seeds, and on what Hypothesis makes of random bytes.

An input fails that raises what the target does not expect, or takes longer than a limit, unless
the target says that it may. It is shown as hex and kept in a file, which
``python -m fuzz --target NAME FILE`` runs again.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import time
import traceback
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from fuzz.mutate import mutate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from fuzz.target import Input, Target

CRASHES = Path(__file__).parent / "crashes"
TIME_LIMIT_S = 10.0

_MAX_RANDOM_BYTES = 2048
_MAX_INPUTS = 2000
_CHANGED_PER_MADE = 10  # Hypothesis takes ten times as long as a change of a seed


class TooSlowError(BaseException):
    """One input took longer than the limit. No Exception, for decoders may catch those."""


class Runner:
    """Runs one target after another, and counts those that failed.

    Args:
        crashes: folder that gets the inputs that failed.
        seed: of the random numbers; the same seed gives the same inputs.
        time_limit_s: processor time that one input may take.
    """

    def __init__(
        self, *, crashes: Path = CRASHES, seed: int = 0, time_limit_s: float = TIME_LIMIT_S
    ) -> None:
        self.num_failed = 0
        self._crashes = crashes
        self._seed = seed
        self._time_limit_s = time_limit_s

    def fuzz(self, target: Target, seconds: float) -> None:
        """Runs every seed of a target, then goes on for the rest of the time or until a failure."""
        started = time.monotonic()
        with self._watched(target):
            done = all(self._succeeds(target, run) for run in _seed_runs(target))
            runs = _random_runs(target, random.Random(f"{target.name} {self._seed}"))
            while done and time.monotonic() - started < seconds:
                done = self._succeeds(target, next(runs))
        share = 100 * target.num_accepted // max(1, target.num_inputs)
        print(
            f"{target.name:18} {target.num_inputs:>9,} executions"
            f" in {time.monotonic() - started:.0f} s, {share}% accepted"
        )

    def replay(self, target: Target, inputs: Sequence[Input]) -> None:
        """Runs a target on these inputs alone."""
        with self._watched(target):
            for source, data in inputs:
                before = target.num_accepted
                if self._succeeds(target, partial(target.check, data)):
                    verdict = "accepted" if target.num_accepted > before else "refused"
                    print(f"{target.name:18} {source}: {verdict}")

    def _succeeds(self, target: Target, run: Callable[[], object]) -> bool:
        try:
            # Again every second, for what is raised in a callback of the garbage collector is lost.
            signal.setitimer(signal.ITIMER_VIRTUAL, self._time_limit_s, 1.0)
            run()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a panic of a library in Rust is not an Exception
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            if target.may_run_long and isinstance(error, TooSlowError):
                return True
            self._report(target, error)
            return False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        return True

    def _report(self, target: Target, error: BaseException) -> None:
        self.num_failed += 1
        data = target.last_input
        path = self._crashes / f"{target.name}-{hashlib.sha256(data).hexdigest()[:12]}"
        path.write_bytes(data)
        traceback.print_exception(error)
        print(f"{target.name} FAILED: {type(error).__name__} against: {target.invariant}")
        print(f"input of {len(data)} bytes, also in {path}:\n{data.hex()}")

    @contextmanager
    def _watched(self, target: Target) -> Iterator[None]:
        """Stops an input that takes too long; keeps the one that the process dies of."""
        self._crashes.mkdir(parents=True, exist_ok=True)
        running = self._crashes / f"{target.name}-{os.getpid()}-running"
        handler = signal.signal(signal.SIGVTALRM, _raise_too_slow)
        file = os.open(running, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        target.on_input = partial(_keep, file)
        try:
            yield
        finally:
            target.on_input = None
            os.close(file)
            running.unlink()
            signal.signal(signal.SIGVTALRM, handler)


def _seed_runs(target: Target) -> Iterator[Callable[[], object]]:
    for _, data in target.seeds():
        yield partial(target.check, data)


def _random_runs(target: Target, rng: random.Random) -> Iterator[Callable[[], object]]:
    inputs = [data for _, data in target.seeds()] or [b""]
    while True:
        for _ in range(_CHANGED_PER_MADE):
            yield partial(target.check, mutate(rng.choice(inputs), inputs, rng))
        before = target.num_accepted
        yield partial(target.fuzz_one_input, rng.randbytes(rng.randint(0, _MAX_RANDOM_BYTES)))
        # What Hypothesis made and the decoder accepted is a good place to go on from.
        if target.num_accepted > before and len(inputs) < _MAX_INPUTS:
            inputs.append(target.last_input)


def _keep(file: int, data: bytes) -> None:
    os.pwrite(file, data, 0)
    os.ftruncate(file, len(data))


def _raise_too_slow(*_: object) -> NoReturn:
    raise TooSlowError
