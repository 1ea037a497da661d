"""What may break, when and how, and what is promised then: one table for the tests beside it.

Combinations that are not here make no sense (nothing is mid-step before HELLO) or are the same as
one that is. Malformed bytes from a front end have a table of their own, in
``tests/tasks/bad_messages.py``; one row here sends them from another process.
"""

from __future__ import annotations

import enum
from typing import NamedTuple


class Side(enum.Enum):
    """Who breaks. The others are looked at."""

    ENGINE = "an engine, under the client that owns it"
    OWNER = "a front end that owns its engine"
    FRONT_END = "one of two front ends of an engine that neither of them owns"
    ONLY_FRONT_END = "the front end of an engine that was started elsewhere"


class Moment(enum.Enum):
    """How far they have come."""

    BEFORE_HELLO = "before the engine's HELLO"
    BEFORE_READY = "after its HELLO"
    LOADING = "while it loads"
    IDLE = "idle"
    STREAMING = "while tokens come"
    MID_STEP = "in a long step"
    DRAINING = "while it drains"
    CALL_PENDING = "while a utility call waits"


class Means(enum.Enum):
    """What happens to the side."""

    CLOSE = "it ends or closes its sockets by itself"
    KILL = "SIGKILL"
    STOP = "SIGSTOP, and then SIGCONT or SIGKILL"
    MALFORMED = "it sends bytes that mean nothing"
    SILENCE = "it says nothing more, or reads nothing more"


class Promise(enum.Enum):
    """What the others may rely on. A process of ours is never left behind (the leak guard)."""

    START_FAILS = "the start ends by EngineStartError, at once or at its own deadline"
    DEAD = "within 2 s every waiter raises EngineDeadError, and later calls do at once"
    WAITS = "callers wait as long as they like; it may go on; leaving the block ends it"
    STAYS_STUCK = "the same, but calls that need no step are answered"
    UNDISTURBED = "the streams get their tokens, and later requests and calls work"
    GONE = "the engine is gone within 2 s of its owner, and so are its sockets"
    LIVES = "the engine serves the others as if nothing was, in bounded memory"
    ENDS = "the engine still ends within its limits, and the others are told"


class Fault(NamedTuple):
    """A row."""

    side: Side
    moment: Moment
    means: Means
    promise: Promise
    is_soak: bool = True


M, By, P = Moment, Means, Promise

# In every run: one row for each side and promise that others do not include.
MATRIX: list[Fault] = [
    Fault(Side.ENGINE, M.BEFORE_HELLO, By.CLOSE, P.START_FAILS),
    Fault(Side.ENGINE, M.BEFORE_HELLO, By.KILL, P.START_FAILS),
    Fault(Side.ENGINE, M.BEFORE_HELLO, By.STOP, P.START_FAILS),
    Fault(Side.ENGINE, M.BEFORE_HELLO, By.MALFORMED, P.START_FAILS),
    Fault(Side.ENGINE, M.BEFORE_HELLO, By.SILENCE, P.START_FAILS, is_soak=False),
    Fault(Side.ENGINE, M.BEFORE_READY, By.CLOSE, P.START_FAILS),
    Fault(Side.ENGINE, M.BEFORE_READY, By.KILL, P.START_FAILS, is_soak=False),
    Fault(Side.ENGINE, M.BEFORE_READY, By.STOP, P.START_FAILS),
    Fault(Side.ENGINE, M.BEFORE_READY, By.MALFORMED, P.START_FAILS),
    Fault(Side.ENGINE, M.BEFORE_READY, By.SILENCE, P.START_FAILS),
    Fault(Side.ENGINE, M.LOADING, By.CLOSE, P.START_FAILS),
    Fault(Side.ENGINE, M.LOADING, By.KILL, P.START_FAILS),
    Fault(Side.ENGINE, M.LOADING, By.STOP, P.START_FAILS),
    Fault(Side.ENGINE, M.LOADING, By.MALFORMED, P.START_FAILS),
    Fault(Side.ENGINE, M.LOADING, By.SILENCE, P.START_FAILS),
    Fault(Side.ENGINE, M.IDLE, By.CLOSE, P.DEAD),
    Fault(Side.ENGINE, M.IDLE, By.KILL, P.DEAD),
    Fault(Side.ENGINE, M.IDLE, By.MALFORMED, P.UNDISTURBED),
    Fault(Side.ENGINE, M.STREAMING, By.CLOSE, P.DEAD),
    Fault(Side.ENGINE, M.STREAMING, By.KILL, P.DEAD, is_soak=False),
    Fault(Side.ENGINE, M.STREAMING, By.STOP, P.WAITS, is_soak=False),
    Fault(Side.ENGINE, M.STREAMING, By.MALFORMED, P.UNDISTURBED, is_soak=False),
    Fault(Side.ENGINE, M.MID_STEP, By.CLOSE, P.DEAD),
    Fault(Side.ENGINE, M.MID_STEP, By.KILL, P.DEAD),
    Fault(Side.ENGINE, M.MID_STEP, By.STOP, P.WAITS),
    Fault(Side.ENGINE, M.MID_STEP, By.SILENCE, P.STAYS_STUCK),
    Fault(Side.ENGINE, M.DRAINING, By.CLOSE, P.DEAD),
    Fault(Side.ENGINE, M.DRAINING, By.KILL, P.DEAD),
    Fault(Side.ENGINE, M.DRAINING, By.STOP, P.WAITS),
    Fault(Side.ENGINE, M.CALL_PENDING, By.CLOSE, P.DEAD),
    Fault(Side.ENGINE, M.CALL_PENDING, By.KILL, P.DEAD),
    Fault(Side.ENGINE, M.CALL_PENDING, By.STOP, P.WAITS),
    Fault(Side.ENGINE, M.CALL_PENDING, By.MALFORMED, P.UNDISTURBED),
    Fault(Side.OWNER, M.BEFORE_HELLO, By.KILL, P.GONE),
    Fault(Side.OWNER, M.BEFORE_HELLO, By.STOP, P.GONE),
    Fault(Side.OWNER, M.LOADING, By.CLOSE, P.GONE),
    Fault(Side.OWNER, M.LOADING, By.KILL, P.GONE, is_soak=False),
    Fault(Side.OWNER, M.LOADING, By.STOP, P.GONE),
    Fault(Side.OWNER, M.IDLE, By.CLOSE, P.GONE),
    Fault(Side.OWNER, M.IDLE, By.KILL, P.GONE),
    Fault(Side.OWNER, M.IDLE, By.STOP, P.GONE),
    Fault(Side.OWNER, M.STREAMING, By.CLOSE, P.GONE),
    Fault(Side.OWNER, M.STREAMING, By.KILL, P.GONE, is_soak=False),
    Fault(Side.OWNER, M.STREAMING, By.STOP, P.GONE),
    Fault(Side.OWNER, M.MID_STEP, By.CLOSE, P.GONE),
    Fault(Side.OWNER, M.MID_STEP, By.KILL, P.GONE),
    Fault(Side.OWNER, M.MID_STEP, By.STOP, P.GONE),
    Fault(Side.OWNER, M.DRAINING, By.KILL, P.GONE),
    Fault(Side.OWNER, M.DRAINING, By.STOP, P.GONE),
    Fault(Side.OWNER, M.CALL_PENDING, By.CLOSE, P.GONE),
    Fault(Side.OWNER, M.CALL_PENDING, By.KILL, P.GONE),
    Fault(Side.OWNER, M.CALL_PENDING, By.STOP, P.GONE),
    Fault(Side.FRONT_END, M.BEFORE_HELLO, By.KILL, P.LIVES),
    Fault(Side.FRONT_END, M.LOADING, By.KILL, P.LIVES),
    Fault(Side.FRONT_END, M.IDLE, By.CLOSE, P.LIVES),
    Fault(Side.FRONT_END, M.IDLE, By.KILL, P.LIVES),
    Fault(Side.FRONT_END, M.STREAMING, By.CLOSE, P.LIVES),
    Fault(Side.FRONT_END, M.STREAMING, By.KILL, P.LIVES, is_soak=False),
    Fault(Side.FRONT_END, M.STREAMING, By.STOP, P.LIVES, is_soak=False),
    Fault(Side.FRONT_END, M.STREAMING, By.MALFORMED, P.LIVES),
    Fault(Side.FRONT_END, M.STREAMING, By.SILENCE, P.LIVES),
    Fault(Side.FRONT_END, M.MID_STEP, By.KILL, P.LIVES),
    Fault(Side.FRONT_END, M.MID_STEP, By.STOP, P.LIVES),
    Fault(Side.FRONT_END, M.CALL_PENDING, By.KILL, P.LIVES),
    Fault(Side.FRONT_END, M.CALL_PENDING, By.STOP, P.LIVES),
    Fault(Side.FRONT_END, M.DRAINING, By.CLOSE, P.ENDS),
    Fault(Side.FRONT_END, M.DRAINING, By.KILL, P.ENDS),
    Fault(Side.FRONT_END, M.DRAINING, By.STOP, P.ENDS),
    Fault(Side.ONLY_FRONT_END, M.IDLE, By.KILL, P.LIVES),
    Fault(Side.ONLY_FRONT_END, M.STREAMING, By.CLOSE, P.LIVES),
    Fault(Side.ONLY_FRONT_END, M.STREAMING, By.KILL, P.LIVES),
    Fault(Side.ONLY_FRONT_END, M.STREAMING, By.STOP, P.LIVES),
]
