"""How long an engine process takes to be gone after SIGTERM.

    python -m tests.benchmarks.shutdown_times                      # medians of 5, all cases
    python -m tests.benchmarks.shutdown_times --repetitions 1 --executor null

Measured from the signal to the end of the process, by a front end that reads all the time. The
cases take turns, so that a busy moment of the machine does not fall on one of them alone. What
the limits of the model's cases allow beyond those of the null executor: the rest of the running
step, which the engine waits for at most ``exit_grace_s``, and the end of an interpreter that has
loaded the model, which is measured here without an engine.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from signal import SIGTERM
from typing import TYPE_CHECKING, NamedTuple

import trio

from tests.benchmarks.engines import MODEL_ENGINE, NULL_ENGINE, null_command, open_wire_engine
from tests.benchmarks.figures import Report, spread
from tests.process.engine_programs import STEP_NEVER_RETURNS, engine_command, scripted_command
from trio_engine.config import EngineConfig
from trio_engine.engine.exit import ExitStatus
from trio_engine.outputs import FinishReason

if TYPE_CHECKING:
    from tests.process.engine_programs import EngineUnderTest
    from trio_engine.testing.core_driver import RequestLog
    from trio_engine.testing.wire_front_end import WireFrontEnd

IDLE_S = 0.5
LOADED_S = 1.0
DRAIN_S = 2.0
DRAINED_S = 2.5
GRACE_S = EngineConfig().exit_grace_s

GIVE_UP_S = 30.0
"""An engine that is not gone by then will not go."""

NUM_REQUESTS = 2048
MAX_TOKENS = 2000
"""Together more than any engine has done when its drain is over."""

ARRIVAL_S = 60.0
"""What the engine has said is on its way through this process: only what was lost takes longer."""

DRAINS = f"--shutdown-timeout={DRAIN_S:g}"

LOADS_THE_MODEL = """
import sys
from trio_engine.config import EngineConfig
from trio_engine.executor.torch_executor import TorchExecutor

executor = TorchExecutor(EngineConfig(max_num_seqs=16, num_blocks=1024))
executor.load()
executor.shutdown()
sys.stdout.write("done")
sys.stdout.flush()
"""


class Case(NamedTuple):
    """An engine, what it is busy with, and how soon after the signal it must be gone.

    ``steps_return`` is False for an executor that never gives a token.
    """

    name: str
    command: list[str]
    num_requests: int
    prompt_tokens: int
    limit_s: float
    steps_return: bool = True


def null_cases(step_ms: float = 0.0) -> list[Case]:
    """256 requests run and the others wait; with steps of no length the engine is never idle.

    Steps that have one set a limit to what any engine can have done when its drain is over.
    """
    step = f"--null-step-ms={step_ms:g}"
    stuck = scripted_command(*NULL_ENGINE, executor=STEP_NEVER_RETURNS)
    stuck_s = GRACE_S
    return [
        Case("null, idle", null_command(step), 0, 0, IDLE_S),
        Case("null, under load", null_command(step), NUM_REQUESTS, 32, LOADED_S),
        Case("null, drain of 2 s", null_command(step, DRAINS), NUM_REQUESTS, 32, DRAINED_S),
        Case("step never returns", stuck, NUM_REQUESTS, 32, LOADED_S + stuck_s, steps_return=False),
        Case(
            "step never returns, drain of 2 s",
            [*stuck, DRAINS],
            NUM_REQUESTS,
            32,
            DRAINED_S + stuck_s,
            steps_return=False,
        ),
    ]


def model_cases(interpreter_exit_s: float) -> list[Case]:
    """More prompt tokens than a step takes, so that a step runs whenever the signal comes."""
    command = engine_command(*MODEL_ENGINE)
    busy_s = GRACE_S + interpreter_exit_s
    return [
        Case("smollm2, idle", command, 0, 0, IDLE_S + interpreter_exit_s),
        Case("smollm2, under load", command, 16, 512, LOADED_S + busy_s),
        Case("smollm2, drain of 2 s", [*command, DRAINS], 16, 512, DRAINED_S + busy_s),
    ]


async def measure(case: Case) -> float:
    """Seconds from the signal to the end of the process, which must be an orderly one."""
    async with open_wire_engine(case.command) as (front_end, engine):
        await start_load(case, front_end, engine)
        async with trio.open_nursery() as tasks:
            tasks.start_soon(read, front_end)
            started = time.perf_counter()
            engine.send(SIGTERM)
            status = await engine.wait(GIVE_UP_S)
            elapsed_s = time.perf_counter() - started
            tasks.cancel_scope.cancel()
        assert status == ExitStatus.STOPPED, engine.stderr
        with trio.fail_after(ARRIVAL_S):
            logs = [await front_end.finish(request_id) for _, request_id in front_end.logs]
        check_was_busy(logs)
    return elapsed_s


def check_was_busy(logs: list[RequestLog]) -> None:
    """An engine that had finished its work before it left was idle, whatever the case is called."""
    reasons = {log.finish_reason for log in logs}
    assert reasons <= {FinishReason.ABORT, FinishReason.LENGTH}, reasons
    assert FinishReason.ABORT in reasons or not logs, "everything was done before the end"


async def start_load(case: Case, front_end: WireFrontEnd, engine: EngineUnderTest) -> None:
    """Returns when the engine is busy and has taken in all requests."""
    prompt = list(range(100, 100 + case.prompt_tokens))
    for number in range(case.num_requests):
        await front_end.add(f"request-{number}", prompt, max_tokens=MAX_TOKENS, ignore_eos=True)
    if not case.steps_return:
        await engine.wait_stderr("stepping")
    elif case.num_requests:
        await front_end.wait_num_tokens("request-0", 2)
    # By the same road: once it is answered, no request is on its way any more.
    await front_end.call_utility("is_sleeping")


async def read(front_end: WireFrontEnd) -> None:
    while True:
        await front_end.next_outputs()


def interpreter_exit_s() -> float:
    """How long an interpreter with torch and the model in it takes to end by itself."""
    with subprocess.Popen([sys.executable, "-c", LOADS_THE_MODEL], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.read(4) == b"done"
        started = time.perf_counter()
        child.wait()
        return time.perf_counter() - started


async def measure_cases(cases: list[Case], repetitions: int, report: Report) -> None:
    """Reports the median of each case."""
    times: dict[str, list[float]] = {case.name: [] for case in cases}
    for _ in range(repetitions):
        for case in cases:
            times[case.name].append(await measure(case))
    for case in cases:
        report.add(case.name, statistics.median(times[case.name]), "s", below=case.limit_s)
        report.note(f"  lowest / median / highest: {spread(times[case.name])}")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--executor", choices=["null", "torch", "all"], default="all")
    parser.add_argument("--repetitions", type=int, default=5, metavar="N")
    options = parser.parse_args(arguments)
    report = Report(f"seconds from SIGTERM to the end, medians of {options.repetitions}")
    cases = null_cases() if options.executor != "torch" else []
    if options.executor != "null":
        exits = [interpreter_exit_s() for _ in range(options.repetitions)]
        report.add("interpreter with the model, by itself", statistics.median(exits), "s")
        cases += model_cases(statistics.median(exits))
    trio.run(measure_cases, cases, options.repetitions, report)
    return report.exit_status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
