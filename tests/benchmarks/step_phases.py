"""What timing the phases of steps costs, as a share of the shortest step there is.

    python -m tests.benchmarks.step_phases

The bookkeeping of a step is what the loop, a writer and the forward thread call for it, with
nothing in between. It is compared with the processor time that an engine with the null executor
and steps of no length uses for a token of one request, bookkeeping included: no step is shorter.
A trace is for steps of a model, so it is compared with 2 ms. Each is the lowest of many, as both
only grow by what else the machine does.
"""

from __future__ import annotations

import argparse
import sys
import timeit
from time import perf_counter_ns
from typing import TYPE_CHECKING

import msgspec
import trio

from tests.benchmarks.engines import null_command
from tests.benchmarks.figures import Report
from trio_engine.bench.engine import open_bench_engine
from trio_engine.bench.load import run_load
from trio_engine.bench.workload import WORKLOADS
from trio_engine.core.plan import StepPlan
from trio_engine.core.step_phases import TIMED_TURN, DeviceClock, StepPhase, StepPhases
from trio_engine.observability.trace import Trace

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_PERCENT = 1.0
TRACED_STEP_US = 2000.0
STEPS_A_TURN = 5 * TIMED_TURN
"""So few that many a turn is not interrupted by what else the machine does."""

PLAN = StepPlan(plan_id=0, slots=[0], num_scheduled_tokens=[1])


def bookkeeping(phases: StepPhases) -> Callable[[], None]:
    """What one step calls, as ``StepLoop._turn``, ``OutputWriter`` and ``ForwardThread`` do."""

    def step() -> None:
        is_timed = phases.begin_turn()
        if is_timed:
            phases.mark(StepPhase.ADMIT)
            phases.mark(StepPhase.SETTLE)
        if not phases.device.is_known:
            phases.device.note_known(True)
        if is_timed:
            phases.mark(StepPhase.PLAN)
            phases.end_turn(waits=True)
        if phases.is_timed:
            phases.note_message(0, perf_counter_ns(), perf_counter_ns(), perf_counter_ns())
        phases.device.launched()
        phases.device.collected(PLAN)

    return step


def bookkeeping_us(num_turns: int, trace: Trace) -> float:
    """Of one step, the lowest mean of all turns."""
    phases = StepPhases(DeviceClock())
    trace.attach(phases)
    times_s = timeit.repeat(bookkeeping(phases), number=STEPS_A_TURN, repeat=num_turns)
    return 1e6 * min(times_s) / STEPS_A_TURN


async def step_us(num_runs: int, num_requests: int) -> float:
    """Processor time of an engine for one step of one request, the lowest of all runs."""
    workload = msgspec.structs.replace(WORKLOADS["single"], num_requests=num_requests)
    async with open_bench_engine(
        null_command("--null-step-ms=0", "--handshake-address={handshake}")
    ) as engine:
        await run_load(engine, workload.warm_up)
        runs = [await run_load(engine, workload) for _ in range(num_runs)]
    return min(run.engine_cpu_us_per_token for run in runs)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=5000, help=f"of {STEPS_A_TURN} steps each")
    parser.add_argument("--runs", type=int, default=5, help="of the engine")
    parser.add_argument("--requests", type=int, default=4, help="of 500 tokens, in each run")
    options = parser.parse_args(arguments)
    report = Report("the phases of a step")
    whole_us = trio.run(step_us, options.runs, options.requests)
    plain_us = bookkeeping_us(options.turns, Trace(None))
    traced_us = bookkeeping_us(options.turns, Trace("/dev/null"))
    report.add("a step of one request, engine's processor time", whole_us, "us")
    report.add("its bookkeeping", plain_us, "us")
    share = 100 * plain_us / whole_us
    report.add("share of the step", share, "%", below=MAX_PERCENT)
    report.add("bookkeeping with a trace", traced_us, "us")
    share = 100 * traced_us / TRACED_STEP_US
    report.add("share of a step of 2 ms", share, "%", below=MAX_PERCENT)
    return report.exit_status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
