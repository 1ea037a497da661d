"""Where the time of an engine's steps goes: by phase, and how long its device had nothing to do.

Pure bookkeeping. The step loop, the writers and the forward thread say what they are doing; nothing
here decides anything. Without a trace a step allocates nothing here that outlives it.
"""

from __future__ import annotations

from time import perf_counter_ns
from typing import TYPE_CHECKING, TypeAlias

from trio_engine.core.statistics import PhaseTime, StepStatistics

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio_engine.core.plan import StepPlan

Span: TypeAlias = "tuple[int, str, int, int, int]"
"""Track, name, start and end in ns of ``perf_counter_ns``, and tokens of a forward pass or 0."""

TIMED_TURN = 23
"""One turn of so many is timed, unless all are traced. What is called for a timed one takes some
5 us, and the shortest steps take 100. A prime, so that it does not fall into step with anything."""

LOOP_TRACK = 0
DEVICE_TRACK = 1
FIRST_WRITER_TRACK = 2
"""Tracks of a trace; the writer of client i has ``FIRST_WRITER_TRACK + i``."""


class StepPhase:
    """What an engine does for a step. No enum, whose members cost as much as a look at the clock.

    ``ADMIT``: taking in messages that were decoded. ``PLAN``: making plans and handing them on.
    ``WAIT``: the loop has nothing to do while a plan is in flight; readers have their turns
    then. ``FORWARD``: the device computes. ``SETTLE``: giving tokens to requests and
    outboxes. ``ENCODE``: one message to a client. ``SEND``: until ZeroMQ has it.
    """

    ADMIT = 0
    PLAN = 1
    WAIT = 2
    FORWARD = 3
    SETTLE = 4
    ENCODE = 5
    SEND = 6


PHASE_NAMES = ("admit", "plan", "wait", "forward", "settle", "encode", "send")
"""By ``StepPhase``."""


class DeviceClock:
    """When the device computes, and how long it did not though a request was known.

    ``launched``, ``collected`` and ``stopped`` are called on the forward thread, the others on the
    loop's; what both touch is one integer at a time.

    Attributes:
        is_known: as ``note_known`` said last.
        record: gets each step and each bubble, for a trace; set before the first plan.
    """

    __slots__ = (
        "_busy_ns",
        "_idle_since",
        "_known_since",
        "_num_launched",
        "_num_steps",
        "_on_loop_ns",
        "_thread_ns",
        "is_known",
        "record",
    )

    def __init__(self) -> None:
        self.is_known = False
        self.record: Callable[[Span], object] | None = None
        self._num_steps = 0
        self._num_launched = 0
        self._busy_ns = 0
        # Bubbles: those before a launch, and those at whose end no request was known any more.
        self._thread_ns = self._on_loop_ns = 0
        self._idle_since = 0
        # 0 while no request is known.
        self._known_since = 0

    def launched(self) -> None:
        """A plan goes to the executor now."""
        self._num_launched = num_launched = self._num_launched + 1
        if num_launched > 1:
            return  # the one before it still computes
        now = perf_counter_ns()
        since, known_since = self._idle_since, self._known_since
        self._idle_since = now
        if known_since:  # else it was aborted before it came here
            if known_since > since:
                since = known_since
            self._thread_ns += now - since
            if self.record is not None:
                self.record((DEVICE_TRACK, "bubble", since, now, 0))

    def collected(self, plan: StepPlan) -> None:
        """The oldest plan, this one, has its result."""
        now = perf_counter_ns()
        self._busy_ns += now - self._idle_since
        self._num_steps += 1
        self._num_launched -= 1
        if self.record is not None:
            span = (DEVICE_TRACK, "forward", self._idle_since, now, plan.num_tokens)
            self.record(span)
        self._idle_since = now

    def stopped(self) -> None:
        """A plan failed, and those behind it do not count."""
        self._num_launched = 0
        self._idle_since = perf_counter_ns()

    def note_known(self, is_known: bool) -> None:
        """Whether there is a request that may run; told before each plan that follows from it.

        Only when it changes.
        """
        self.is_known = is_known
        now = perf_counter_ns()
        if is_known:
            self._known_since = now
            return
        # What no launch will count. While a plan runs, nothing is idle.
        if not self._num_launched:
            since = max(self._known_since, self._idle_since)
            self._on_loop_ns += now - since
        self._known_since = 0

    @property
    def num_steps(self) -> int:
        """Steps collected."""
        return self._num_steps

    @property
    def busy_ns(self) -> int:
        """Time in which a plan was with the executor, up to the last one collected."""
        return self._busy_ns

    @property
    def bubble_ns(self) -> int:
        """Time in which none was though a request was known, up to the last launch."""
        return self._thread_ns + self._on_loop_ns


class StepPhases:
    """Adds up how long the phases of steps take.

    Args:
        device: what the forward thread tells.

    Attributes:
        is_timed: whether the turn that goes on, and what is sent after it, is timed.
    """

    __slots__ = (
        "_counts",
        "_period",
        "_record",
        "_since",
        "_totals_ns",
        "_turns_left",
        "_waits",
        "device",
        "is_timed",
    )

    def __init__(self, device: DeviceClock) -> None:
        self.device = device
        self.is_timed = False
        self._totals_ns = [0] * len(PHASE_NAMES)
        self._counts = [0] * len(PHASE_NAMES)
        self._record: Callable[[Span], object] | None = None
        self._period = TIMED_TURN
        self._turns_left = 1
        self._since = 0
        self._waits = False

    def trace_to(self, record: Callable[[Span], object]) -> None:
        """Has every span recorded, and every turn timed, from the next one on."""
        self._record = self.device.record = record
        self._period = self._turns_left = 1

    def begin_turn(self) -> bool:
        """The loop has something to do. Returns ``is_timed``: only then is the rest called."""
        if self.is_timed and self._waits:
            self._add(LOOP_TRACK, StepPhase.WAIT, self._since, perf_counter_ns())
        self._turns_left -= 1
        if self._turns_left:
            self.is_timed = False
            return False
        self._turns_left = self._period
        self.is_timed = True
        self._since = perf_counter_ns()
        return True

    def mark(self, phase: int) -> None:
        """A ``StepPhase`` of the loop ends; it began where the one before ended."""
        start, self._since = self._since, perf_counter_ns()
        self._add(LOOP_TRACK, phase, start, self._since)

    def end_turn(self, *, waits: bool) -> None:
        """The turn is over; ``waits``: for a plan in flight, so that the wait belongs to a step."""
        self._since = perf_counter_ns()
        self._waits = waits

    def note_message(self, client_index: int, start: int, encoded: int, sent: int) -> None:
        """A message to a client was encoded and sent; times of ``perf_counter_ns``."""
        track = FIRST_WRITER_TRACK + client_index
        self._add(track, StepPhase.ENCODE, start, encoded)
        self._add(track, StepPhase.SEND, encoded, sent)

    def statistics(self) -> StepStatistics:
        """What was added up until now."""
        device = self.device
        phases = {
            name: PhaseTime(num_timed=count, total_s=total / 1e9)
            for name, count, total in zip(PHASE_NAMES, self._counts, self._totals_ns, strict=True)
        }
        phases["forward"] = PhaseTime(num_timed=device.num_steps, total_s=device.busy_ns / 1e9)
        return StepStatistics(
            num_steps=device.num_steps,
            device_busy_s=device.busy_ns / 1e9,
            bubble_s=device.bubble_ns / 1e9,
            phases=phases,
        )

    def _add(self, track: int, phase: int, start: int, end: int) -> None:
        self._totals_ns[phase] += end - start
        self._counts[phase] += 1
        if self._record is not None:
            self._record((track, PHASE_NAMES[phase], start, end, 0))
