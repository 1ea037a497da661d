"""Where the time of steps goes: bubbles by hand-made moments, phases by turns."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from trio_engine.core import step_phases
from trio_engine.core.plan import StepPlan
from trio_engine.core.statistics import PhaseTime, StepStatistics
from trio_engine.core.step_phases import TIMED_TURN, DeviceClock, StepPhase, StepPhases

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio_engine.core.step_phases import Span


class Moments:
    """A clock that stands still between calls of ``at``."""

    def __init__(self) -> None:
        self.now_ns = 1_000

    def __call__(self) -> int:
        return self.now_ns


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Moments:
    moments = Moments()
    monkeypatch.setattr(step_phases, "perf_counter_ns", moments)
    return moments


class TestDevice:
    def play(self, device: DeviceClock, clock: Moments, events: str) -> None:
        """Lets ten ns pass before each: Known, Unknown, Launched, Collected, Stopped."""
        plan = StepPlan(plan_id=0, slots=[3, 4], num_scheduled_tokens=[1, 6])
        moves: dict[str, Callable[[], None]] = {
            "L": device.launched,
            "C": partial(device.collected, plan),
            "S": device.stopped,
        }
        for event in events:
            clock.now_ns += 10
            if event in "KU":
                device.note_known(event == "K")
            else:
                moves[event]()

    @pytest.mark.parametrize(
        ("events", "busy_ns", "bubble_ns"),
        [
            ("KLC", 10, 10),
            ("KLCLC", 20, 20),
            # Two plans with the executor at once: it is busy from the first to the last.
            ("KLLCC", 30, 10),
            ("KLLCLC", 40, 10),
            # After the last result the request is known until it is settled, and then no more.
            ("KLCUKLC", 20, 30),
            ("KLCU", 10, 20),
            ("KU", 0, 10),
            # Aborted while its plan runs: that is no bubble, nor is what comes after.
            ("KLUCKLC", 30, 20),
            # Aborted before its plan came to the thread.
            ("KULC", 10, 10),
            # A step that failed is not a step, and the device has nothing to do after it.
            ("KLSLC", 10, 20),
            ("LC", 10, 0),
        ],
    )
    def test_time_is_busy_or_a_bubble_or_nobodys(
        self, clock: Moments, events: str, busy_ns: int, bubble_ns: int
    ) -> None:
        device = DeviceClock()
        self.play(device, clock, events)
        assert (device.busy_ns, device.bubble_ns) == (busy_ns, bubble_ns)
        assert device.num_steps == events.count("C")

    def test_a_trace_has_each_step_and_each_bubble_end_to_end(self, clock: Moments) -> None:
        device = DeviceClock()
        spans: list[Span] = []
        device.record = spans.append
        self.play(device, clock, "KLLCCLC")
        found = [(name, num_tokens) for _, name, _, _, num_tokens in spans]
        forward, bubble = ("forward", 7), ("bubble", 0)
        assert found == [bubble, forward, forward, bubble, forward]
        assert all(before[3] == after[2] for before, after in pairwise(spans))
        bubbles_ns = [end - start for _, name, start, end, _ in spans if name == "bubble"]
        assert sum(bubbles_ns) == device.bubble_ns


def take_turn(phases: StepPhases, clock: Moments, *, waits: bool = True) -> None:
    is_timed = phases.begin_turn()
    assert is_timed is phases.is_timed
    for phase, length_ns in ((StepPhase.ADMIT, 1), (StepPhase.SETTLE, 2), (StepPhase.PLAN, 4)):
        clock.now_ns += length_ns
        if is_timed:
            phases.mark(phase)
    clock.now_ns += 8
    if is_timed:
        phases.end_turn(waits=waits)
    clock.now_ns += 16


def test_one_turn_of_several_is_timed(clock: Moments) -> None:
    phases = StepPhases(DeviceClock())
    for _ in range(TIMED_TURN + 1):
        take_turn(phases, clock)
        clock.now_ns += 1000
    phases.begin_turn()
    found = phases.statistics().phases
    assert {name: time.num_timed for name, time in found.items()} == {
        "admit": 2,
        "plan": 2,
        "wait": 2,
        "forward": 0,
        "settle": 2,
        "encode": 0,
        "send": 0,
    }
    means_ns = {name: round(time.mean_s * 1e9) for name, time in found.items()}
    assert means_ns == {
        "admit": 1,
        "plan": 4,
        "wait": 1016,
        "forward": 0,
        "settle": 2,
        "encode": 0,
        "send": 0,
    }


def test_a_wait_without_a_plan_in_flight_belongs_to_no_step(clock: Moments) -> None:
    phases = StepPhases(DeviceClock())
    take_turn(phases, clock, waits=False)
    phases.begin_turn()
    assert phases.statistics().phases["wait"] == PhaseTime()


def test_what_a_writer_does_has_its_own_phases() -> None:
    phases = StepPhases(DeviceClock())
    phases.note_message(0, 10, 15, 35)
    phases.note_message(1, 50, 55, 75)
    found = phases.statistics().phases
    assert found["encode"] == PhaseTime(num_timed=2, total_s=10e-9)
    assert found["send"] == PhaseTime(num_timed=2, total_s=40e-9)


def test_a_trace_has_every_turn(clock: Moments) -> None:
    phases = StepPhases(DeviceClock())
    spans: list[Span] = []
    phases.trace_to(spans.append)
    for _ in range(3):
        take_turn(phases, clock)
    names = [name for _, name, _, _, _ in spans]
    assert names == ["admit", "settle", "plan", "wait"] * 2 + ["admit", "settle", "plan"]


def test_statistics_of_a_time_are_the_later_less_the_earlier() -> None:
    def made(times: int) -> StepStatistics:
        return StepStatistics(
            num_steps=times,
            device_busy_s=3.0 * times,
            bubble_s=1.0 * times,
            phases={"plan": PhaseTime(num_timed=times, total_s=0.5 * times)},
        )

    assert made(5).since(made(2)) == made(3)
    assert made(5).since(StepStatistics()) == made(5)
    assert made(2).bubble_share == 0.25
    assert StepStatistics().bubble_share == 0.0
