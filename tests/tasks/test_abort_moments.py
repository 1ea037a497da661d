"""Aborts on Trio's thread against steps in the forward thread, at every moment of a step.

The thread is real and stops at gates, so that the moment is one and the same each time. What runs
there checks blocks, rows and tokens, and a request's run alone is the oracle for its tokens.
"""

from __future__ import annotations

import random
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trio_engine.config import EngineConfig
from trio_engine.core.engine_core import EngineCore
from trio_engine.engine.doorbell import Doorbell
from trio_engine.engine.forward_thread import open_forward_thread
from trio_engine.engine.inbox import Arrival
from trio_engine.engine.start_up import wait_loaded
from trio_engine.engine.step_loop import StepLoop
from trio_engine.executor.kv_checking import KVCheckingExecutor
from trio_engine.testing.promises import Promises
from trio_engine.testing.requests import make_request, run_alone
from trio_engine.testing.scripted_executor import Gate
from trio_engine.wire.messages import AbortRequest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from trio_engine.core.plan import StepPlan, StepResult
    from trio_engine.testing.promises import Life

pytestmark = pytest.mark.known_fault(kind="abort-during-a-step")

TEST_TIMEOUT_S = 60.0

# Three rows and blocks for two requests of full length: the third waits or is preempted.
CONFIG = EngineConfig(
    executor="kv-checking", max_model_len=16, block_size=2, num_blocks=13, max_num_seqs=3
)

Moment = Literal["planned", "launched", "computed", "returned"]
MOMENTS: list[Moment] = ["planned", "launched", "computed", "returned"]
"""Before the plan reaches the executor, once it was launched, once it was computed and before its
result has left the thread, and once that waits for the step loop to account for it."""


class AnnouncedGate(Gate):
    """A gate to which perhaps nobody comes; whoever is held there is announced."""

    def __init__(self, announce: Callable[[], object]) -> None:
        super().__init__()
        self._announce = announce

    @property
    def is_held(self) -> bool:
        with self._condition:
            return self._num_held > 0 and not super()._may_pass()

    def _may_pass(self) -> bool:
        may_pass = super()._may_pass()
        if not may_pass:
            self._announce()
        return may_pass


class GatedExecutor(KVCheckingExecutor):
    """Stops before a launch, after it, and before it gives a result."""

    def __init__(self, config: EngineConfig, announce: Callable[[], object]) -> None:
        super().__init__(config)
        self.gates: dict[Moment, AnnouncedGate] = {
            "planned": AnnouncedGate(announce),
            "launched": AnnouncedGate(announce),
            "computed": AnnouncedGate(announce),
        }

    def launch(self, plan: StepPlan) -> None:
        self.gates["planned"].pass_through()
        super().launch(plan)
        self.gates["launched"].pass_through()

    def collect(self) -> StepResult:
        result = super().collect()
        self.gates["computed"].pass_through()
        return result


class Rig:
    """A step loop and its thread, and one client's view of its requests."""

    def __init__(self) -> None:
        self.doorbell = Doorbell()
        # Rung when the thread is held at a gate, or a result has come back.
        self._news = Doorbell()
        self._token = trio.lowlevel.current_trio_token()
        self.executor = GatedExecutor(CONFIG, partial(self._token.run_sync_soon, self._news.ring))
        self.loop: StepLoop
        self.promises = Promises(
            lambda request: run_alone(request, max_model_len=CONFIG.max_model_len or 0)
        )
        self.at_result: Callable[[], object] | None = None

    @property
    def core(self) -> EngineCore:
        return self.loop.core

    def on_event(self) -> None:
        """A result has come back, on the thread."""
        self._token.run_sync_soon(self._at_event)

    def _at_event(self) -> None:
        # The step loop has not looked at the result: it was not rung before.
        act, self.at_result = self.at_result, None
        if act is not None:
            act()
        self.doorbell.ring()
        self._news.ring()

    async def wait_news(self) -> None:
        """The thread is at a gate or has given a result, and the loop has done what it can."""
        await self._news.wait()
        await wait_all_tasks_blocked()

    def add(self, request_id: str, prompt: list[int], **params: Any) -> Life:
        life = self.promises.begin(make_request(request_id, prompt, **params))
        self.loop.inbox.put_nowait([Arrival(0, life.request)])
        return life

    def abort(self, *request_ids: str) -> None:
        """As far as the client knows; what was computed before may still come."""
        for request_id in request_ids:
            life = self.promises.find(0, request_id)
            if life is not None:
                life.awaits_abort = True
        self.loop.inbox.put_nowait([Arrival(0, AbortRequest(list(request_ids)))])

    def receive(self) -> None:
        for message in self.core.outboxes[0].take(0.0):
            self.promises.hear(0, message)

    async def has_next_plan(self) -> bool:
        """Waits for a plan that is to be launched, and then waits; or that there is none."""
        gate = self.executor.gates["planned"]
        gate.close()
        await wait_all_tasks_blocked()
        while self.core.num_plans_in_flight and not gate.is_held:
            await self.wait_news()
        return gate.is_held

    async def step_until(self, is_there: Callable[[], bool]) -> None:
        """Lets plans go one by one; the next one then waits to be launched."""
        while await self.has_next_plan() and not is_there():
            self.executor.gates["planned"].let_pass()

    async def do_at(self, moment: Moment, act: Callable[[], object]) -> None:
        """Does something at a moment of the plan that waits, and lets the loop take it."""
        gates = self.executor.gates
        if moment == "planned":
            act()
        elif moment == "returned":
            self.at_result = act
            gates["planned"].let_pass()
            while self.at_result is not None:
                await self.wait_news()
        else:
            gates[moment].close()
            gates["planned"].let_pass()
            await gates[moment].wait_held()
            act()
        await wait_all_tasks_blocked()
        self.check()
        if moment in gates:
            gates[moment].open()
            gates["planned"].close()

    async def run_to_the_end(self) -> None:
        self.executor.gates["planned"].open()
        await wait_all_tasks_blocked()  # the loop has looked into its inbox
        while self.core.has_requests or self.core.num_plans_in_flight:
            await self.wait_news()
        self.check()
        self.promises.check_every_life_is_over()
        statistics = self.core.statistics()
        assert statistics.num_free_blocks == statistics.num_blocks

    def check(self) -> None:
        self.receive()
        self.core.check_integrity()
        self.promises.check_no_output_after_a_terminal_event()
        self.promises.check_tokens_equal_a_solo_run()
        self.promises.check_every_end_has_a_cause()


@asynccontextmanager
async def open_rig() -> AsyncIterator[Rig]:
    rig = Rig()
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_forward_thread(rig.executor, rig.on_event) as forward:
            properties = await wait_loaded(forward, rig.doorbell)
            core = EngineCore(CONFIG, properties, num_clients=1, clock=lambda: 1.0)
            rig.loop = StepLoop(
                core, forward, pipeline_depth=2, doorbell=rig.doorbell, on_output=lambda _: None
            )
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(rig.loop.run)
                    yield rig
                    nursery.cancel_scope.cancel()
            finally:
                for gate in rig.executor.gates.values():
                    gate.open()


# One abort at one moment

OPEN = ["old", "young", "younger", "late"]
"""Those that live then: two run, the third was preempted for the second, the fourth waits."""

TARGETS: dict[str, list[str]] = {
    "running": ["old"],
    "preempted": ["younger"],
    "waiting": ["late"],
    "finished": ["done"],
    "unknown": ["nobody"],
    "the same twice": ["old", "old"],
    "all at once": ["done", *OPEN, "nobody"],
}


@pytest.mark.parametrize("targets", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("moment", MOMENTS)
async def test_an_abort_at_any_moment_of_a_step_ends_its_request_there_and_no_other(
    moment: Moment, targets: list[str]
) -> None:
    async with open_rig() as rig:
        done = rig.add("done", [9], max_tokens=1)
        await rig.run_to_the_end()
        lives = {id_: rig.add(id_, [len(id_), 2, 3], max_tokens=12) for id_ in OPEN}
        await rig.step_until(lambda: rig.core.statistics().num_preemptions == 1)
        await rig.do_at(moment, lambda: rig.abort(*targets))
        for request_id, life in lives.items():
            assert life.is_over == (request_id in targets), "at once, and nobody else"
        await rig.run_to_the_end()
        aborted = {request_id for request_id, life in lives.items() if life.is_aborted}
        assert aborted == lives.keys() & set(targets)
        assert not done.is_aborted


# Many aborts at random moments


async def run_schedule(dice: random.Random) -> None:
    """A few requests, and aborts of some, all or none of them at each of their steps."""
    async with open_rig() as rig:
        names = [f"r{number}" for number in range(dice.randint(2, 5))]
        arrivals = [*names, *names[:2]]  # an id may be used again once its request is over

        def arrive() -> None:
            rig.receive()
            for request_id in arrivals[: dice.randint(1, 3)]:
                if rig.promises.find(0, request_id) is None:
                    arrivals.remove(request_id)
                    prompt = [dice.randrange(40) for _ in range(dice.randint(1, 6))]
                    rig.add(request_id, prompt, max_tokens=dice.randint(1, 9))

        def interfere() -> None:
            if arrivals and dice.random() < 0.4:
                arrive()
            if dice.random() < 0.5:
                rig.abort(*dice.sample([*names, "nobody"], dice.randint(1, len(names))))

        arrive()
        while True:
            if await rig.has_next_plan():
                await rig.do_at(dice.choice(MOMENTS), interfere)
            elif arrivals:
                arrive()
            else:
                break
        await rig.run_to_the_end()


@pytest.mark.parametrize("num_schedules", [10, pytest.param(10_000, marks=pytest.mark.soak)])
async def test_aborts_at_random_moments_of_random_schedules(num_schedules: int) -> None:
    for seed in range(num_schedules):
        await run_schedule(random.Random(seed))
