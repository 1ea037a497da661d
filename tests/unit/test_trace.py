"""Traces: what a viewer of Chrome's format gets, and how much is kept."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest

from trio_engine.core.plan import StepPlan
from trio_engine.core.step_phases import (
    DEVICE_TRACK,
    FIRST_WRITER_TRACK,
    LOOP_TRACK,
    DeviceClock,
    StepPhase,
    StepPhases,
)
from trio_engine.errors import ConfigError
from trio_engine.observability.trace import Trace

if TYPE_CHECKING:
    from pathlib import Path


def events_in(path: Path) -> list[dict[str, Any]]:
    read = json.loads(path.read_text())
    events: list[dict[str, Any]] = read["traceEvents"]
    return events


def spans_in(path: Path) -> list[dict[str, Any]]:
    return [event for event in events_in(path) if event["ph"] == "X"]


def take_step(phases: StepPhases) -> None:
    assert phases.begin_turn()
    phases.device.note_known(True)
    phases.mark(StepPhase.PLAN)
    phases.end_turn(waits=True)
    phases.device.launched()
    phases.device.collected(StepPlan(plan_id=0, slots=[0], num_scheduled_tokens=[5]))


def test_a_trace_has_a_track_for_the_loop_the_device_and_each_writer(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace, phases = Trace(str(path)), StepPhases(DeviceClock())
    trace.attach(phases)
    for _ in range(3):
        take_step(phases)
    phases.note_message(1, 10, 20, 30)
    trace.write()
    tracks = {
        event["tid"]: event["args"]["name"]
        for event in events_in(path)
        if event["name"] == "thread_name"
    }
    writer = FIRST_WRITER_TRACK + 1
    names = {LOOP_TRACK: "step loop", DEVICE_TRACK: "device", writer: "writer of client 1"}
    assert tracks == names
    found = [(span["tid"], span["name"]) for span in spans_in(path)]
    assert found.count((LOOP_TRACK, "plan")) == 3
    assert found.count((LOOP_TRACK, "wait")) == 2
    assert found.count((DEVICE_TRACK, "forward")) == found.count((DEVICE_TRACK, "bubble")) == 3
    assert [pair for pair in found if pair[0] == writer] == [(writer, "encode"), (writer, "send")]


def test_times_are_microseconds_since_the_first_span(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace, phases = Trace(str(path)), StepPhases(DeviceClock())
    trace.attach(phases)
    phases.note_message(0, 5_000_000, 5_001_500, 5_004_000)
    trace.write()
    shown = [(span["name"], span["ts"], span["dur"]) for span in spans_in(path)]
    assert shown == [("encode", 0.0, 1.5), ("send", 1.5, 2.5)]


def test_a_forward_pass_says_how_many_tokens_it_computed(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace, phases = Trace(str(path)), StepPhases(DeviceClock())
    trace.attach(phases)
    take_step(phases)
    trace.write()
    args = {span["name"]: span.get("args") for span in spans_in(path)}
    assert args == {"forward": {"tokens": 5}, "bubble": None, "plan": None}


def test_only_the_newest_spans_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace, phases = Trace(str(path), max_spans=8), StepPhases(DeviceClock())
    trace.attach(phases)
    for number in range(100):
        phases.note_message(0, 1000 * number, 1000 * number + 1, 1000 * number + 2)
    trace.write()
    # Those of the last four messages.
    starts_ns = [round(1000 * span["ts"]) for span in spans_in(path)]
    assert starts_ns == [0, 1, 1000, 1001, 2000, 2001, 3000, 3001]


def test_an_engine_that_did_nothing_has_an_empty_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    Trace(str(path)).write()
    assert spans_in(path) == []


def test_a_file_that_cannot_be_written_is_noticed_at_once() -> None:
    with pytest.raises(ConfigError, match=r"trace cannot be written to '/no/such/folder/x'"):
        Trace("/no/such/folder/x")


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="it is a pipe"):
        Trace(str(tmp_path / "pipe"))


def test_a_disk_that_fails_at_the_end_is_one_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    trace = Trace(str(folder / "trace.json"))
    (folder / "trace.json").unlink()
    folder.rmdir()
    trace.write()
    assert "trace_failed path=" in caplog.text


def test_without_a_file_nothing_is_recorded() -> None:
    phases = StepPhases(DeviceClock())
    trace = Trace(None)
    trace.attach(phases)
    trace.write()
    assert phases.device.record is None
