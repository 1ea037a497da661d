"""What a step costs the core, and whether it matters how many requests wait.

    python -m tests.benchmarks.scheduler_cost
    python -m tests.benchmarks.scheduler_cost --policy priority --waiting 0 100000

Each core runs 256 requests that decode, with an executor that is not there: ``schedule`` plans a
step while the one before it is in flight, ``update`` settles that one, and the outbox is taken.
The cores take turns of 20 steps, so that a busy moment of the machine does not fall on one of them
alone. One in sixteen rows needs a new block in each step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import TYPE_CHECKING

from tests.benchmarks.figures import Report
from trio_engine.config import EngineConfig, SchedulingPolicy
from trio_engine.core.engine_core import EngineCore
from trio_engine.core.plan import ExecutorProperties, StepResult
from trio_engine.requests import EngineCoreRequest
from trio_engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from trio_engine.core.plan import StepPlan

MAX_RATIO = 1.3
NUM_RUNNING = 256
BLOCK_SIZE = 16
VOCAB_SIZE = 50_000
MAX_MODEL_LEN = 4096
STEPS_A_TURN = 20
TOKEN_ID = 5
PARAMS = SamplingParams(temperature=0.0, max_tokens=MAX_MODEL_LEN)


class CoreUnderLoad:
    """A core with running and waiting requests, and the times of its steps in seconds."""

    def __init__(self, num_waiting: int, policy: SchedulingPolicy) -> None:
        properties = ExecutorProperties(
            vocab_size=VOCAB_SIZE,
            max_model_len=MAX_MODEL_LEN,
            block_size=BLOCK_SIZE,
            num_blocks=NUM_RUNNING * MAX_MODEL_LEN // BLOCK_SIZE,
        )
        config = EngineConfig(max_num_seqs=NUM_RUNNING, scheduling_policy=policy)
        self.core = EngineCore(config, properties, num_clients=1, clock=time.monotonic)
        for number in range(NUM_RUNNING + num_waiting):
            self.core.add(make_request(number))
        self.schedule_s: list[float] = []
        self.update_s: list[float] = []
        self._in_flight = self._plan()
        self.run(4)  # prompts
        self.schedule_s.clear()
        self.update_s.clear()
        counts = self.core.statistics()
        assert counts.num_running_requests == NUM_RUNNING
        assert counts.num_waiting_requests == num_waiting

    def run(self, num_steps: int) -> None:
        """Plans and settles so many steps."""
        for _ in range(num_steps):
            started = time.perf_counter()
            following = self._plan()
            planned = time.perf_counter()
            token_ids = [TOKEN_ID] * len(self._in_flight.slots)
            result = StepResult(plan_id=self._in_flight.plan_id, token_ids=token_ids)
            settling = time.perf_counter()
            self.core.update(result)
            settled = time.perf_counter()
            self.core.outboxes[0].take(0.0)
            self._in_flight = following
            self.schedule_s.append(planned - started)
            self.update_s.append(settled - settling)

    def median_pair_us(self) -> float:
        """Of one ``schedule`` and one ``update``."""
        pairs = zip(self.schedule_s, self.update_s, strict=True)
        return 1e6 * statistics.median(planning + settling for planning, settling in pairs)

    def _plan(self) -> StepPlan:
        plan = self.core.schedule()
        assert plan is not None
        return plan


def make_request(number: int) -> EngineCoreRequest:
    """Prompts of 17 to 32 tokens, so that rows come to the ends of their blocks one by one."""
    prompt = [(number * 7 + position) % VOCAB_SIZE for position in range(17 + number % BLOCK_SIZE)]
    return EngineCoreRequest(
        f"r{number}",
        prompt,
        None,
        PARAMS,
        None,
        float(number),
        None,
        None,
        None,
        priority=number % 3,
    )


def measure(numbers: list[int], policy: SchedulingPolicy, num_turns: int, report: Report) -> None:
    """Reports each core's median, and the ratio of the largest to the smallest."""
    cores = {number: CoreUnderLoad(number, policy) for number in numbers}
    for _ in range(num_turns):
        for core in cores.values():
            core.run(STEPS_A_TURN)
    pairs = {}
    for number, core in cores.items():
        pairs[number] = core.median_pair_us()
        report.add(f"{policy}, {number} waiting: schedule + update", pairs[number], "us")
        schedule_us = 1e6 * statistics.median(core.schedule_s)
        report.add(f"{policy}, {number} waiting: schedule alone", schedule_us, "us")
    ratio = max(pairs.values()) / min(pairs.values())
    report.add(f"{policy}: the longest over the shortest", ratio, "", below=MAX_RATIO)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policy", choices=["fcfs", "priority", "all"], default="all")
    parser.add_argument("--waiting", type=int, nargs="+", default=[0, 1000, 10_000])
    parser.add_argument("--turns", type=int, default=50, help=f"of {STEPS_A_TURN} steps each")
    options = parser.parse_args(arguments)
    report = Report(f"a step of {NUM_RUNNING} running requests")
    policies: list[SchedulingPolicy] = ["fcfs", "priority"]
    for policy in policies if options.policy == "all" else [options.policy]:
        measure(options.waiting, policy, options.turns, report)
    return report.exit_status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
