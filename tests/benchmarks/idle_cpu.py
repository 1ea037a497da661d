"""How much processor time an engine uses that has nothing to do, or may not do it.

    python -m tests.benchmarks.idle_cpu                # null executor and the built-in model, 10 s
    python -m tests.benchmarks.idle_cpu --seconds 2 --executor null

An engine is looked at before its first request, and then in a pause of each kind with requests
that wait: ``keep`` also holds requests that have started, ``wait`` and ``abort`` none. The time is
that of all threads of its process, as a share of one core.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

import trio

from tests.benchmarks.engines import MODEL_ENGINE, null_command, open_wire_engine
from tests.benchmarks.figures import Report
from tests.process.engine_programs import engine_command
from trio_engine.bench.engine import process_cpu_s
from trio_engine.requests import PauseMode

if TYPE_CHECKING:
    from trio_engine.testing.wire_front_end import WireFrontEnd

MAX_PERCENT = 1.0
SETTLE_S = 0.5
"""After the last message was answered: threads of a step have gone to sleep."""

PROMPT = list(range(100, 132))
NUM_WAITING = 64
COMMANDS = {
    "null": null_command("--null-step-ms=2"),
    "torch": engine_command(*MODEL_ENGINE),
}


async def measure_engine(executor: str, seconds: float, report: Report) -> None:
    """Reports an engine's processor time while it is idle, then paused in each way."""
    async with open_wire_engine(COMMANDS[executor]) as (front_end, engine):

        async def measure(state: str) -> None:
            await front_end.call_utility("is_sleeping")  # answered behind what was sent before
            await trio.sleep(SETTLE_S)
            before, started = process_cpu_s(engine.process.pid), trio.current_time()
            await trio.sleep(seconds)
            used_s = process_cpu_s(engine.process.pid) - before
            percent = 100 * used_s / (trio.current_time() - started)
            report.add(f"{executor}, {state}", percent, "% of a core", below=MAX_PERCENT)

        await measure("idle since its start")
        for mode in PauseMode:
            num_waiting = await pause_with_waiting(front_end, mode)
            await measure(f"paused by {mode}, {num_waiting} requests wait")
            await resume_and_abort(front_end)
        await measure("idle after requests")


async def pause_with_waiting(front_end: WireFrontEnd, mode: PauseMode) -> int:
    """Starts some requests, pauses, and adds more. Returns how many wait for the resume."""
    for number in range(4):
        await front_end.add(f"started-{number}", PROMPT, max_tokens=24)
    await front_end.wait_num_tokens("started-3", 1)
    await front_end.call_utility("pause_scheduler", mode)
    for number in range(NUM_WAITING):
        await front_end.add(f"waiting-{number}", PROMPT)
    answer = await front_end.call_utility("is_scheduler_paused")
    assert answer.result is not None, answer.failure_message
    assert answer.result.value, "not paused"
    return sum(log.finish_reason is None for log in front_end.logs.values())


async def resume_and_abort(front_end: WireFrontEnd) -> None:
    """Leaves the engine without requests."""
    await front_end.abort(*(request_id for _, request_id in front_end.logs))
    await front_end.call_utility("resume_scheduler")
    front_end.logs.clear()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--executor", choices=[*COMMANDS, "all"], default="all")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of each look")
    options = parser.parse_args(arguments)
    report = Report(f"processor time of an engine without work, over {options.seconds:g} s")
    for executor in COMMANDS if options.executor == "all" else [options.executor]:
        trio.run(measure_engine, executor, options.seconds, report)
    return report.exit_status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
