"""Workloads for the core with the KV-checking executor, and their oracle: solo runs.

A run makes the moves of the step loop, the forward thread and the clients one at a time; whoever
chooses them, at random or by Hypothesis, meets every interleaving.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, Literal

from trio_engine.config import EngineConfig
from trio_engine.core.engine_core import EngineCore
from trio_engine.errors import RequestStepError
from trio_engine.executor.kv_checking import KVCheckingExecutor
from trio_engine.outputs import FinishReason
from trio_engine.requests import EngineCoreRequest, PauseMode
from trio_engine.sampling_params import SamplingParams
from trio_engine.testing.core_driver import CoreDriver, RequestLog

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trio_engine.core.plan import StepPlan, StepResult
    from trio_engine.executor.base import Executor
    from trio_engine.requests import LoRARequest

VOCAB_SIZE = 40
NUM_CLIENTS = 2
# Ten times what the longest workload takes: a bug is a failure and not a hang.
MAX_MOVES = 20_000

Moment = Literal["launch", "collect"]


class FlakyExecutor(KVCheckingExecutor):
    """Fails on demand, before a plan runs or after all of it ran."""

    def __init__(self, config: EngineConfig, *, launches_ahead: bool) -> None:
        super().__init__(config, launches_ahead=launches_ahead, vocab_size=VOCAB_SIZE)
        self.num_faults = 0
        # Which row is at fault in the plan that is next launched or collected.
        self.next_faults: dict[Moment, int] = {}
        self._slots: deque[Sequence[int]] = deque()

    def launch(self, plan: StepPlan) -> None:
        self._fail("launch", plan.slots)
        super().launch(plan)
        self._slots.append(plan.slots)

    def collect(self) -> StepResult:
        result = super().collect()
        self._fail("collect", self._slots.popleft())
        return result

    def _fail(self, moment: Moment, slots: Sequence[int]) -> None:
        row = self.next_faults.pop(moment, None)
        if row is not None:
            self.num_faults += 1
            raise RequestStepError(f"planted at {moment}", slots=[slots[row % len(slots)]])


@dataclass
class Workload:
    """Requests and the limits they run under."""

    config: EngineConfig
    launches_ahead: bool
    requests: list[EngineCoreRequest]


@dataclass
class Life:
    """One life of a request id, and what its client heard of it."""

    request: EngineCoreRequest
    log: RequestLog
    is_aborted: bool = False
    solo: RequestLog | None = None

    @property
    def is_over(self) -> bool:
        return self.is_aborted or self.log.finish_reason is not None

    @property
    def is_ended_early(self) -> bool:
        return self.is_aborted or self.log.finish_reason is FinishReason.ERROR


class WorkloadRun:
    """A workload on its way. A move that cannot be made now is none; each is checked."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.executor = self.make_executor(workload)
        self.core = make_core(workload.config, self.executor)
        self.driver = CoreDriver(
            self.core, self.executor, pipeline_depth=workload.config.pipeline_depth
        )
        self.arrivals = list(workload.requests)
        self.lives: list[Life] = []
        self._num_moves = 0

    def make_executor(self, workload: Workload) -> FlakyExecutor:
        """What runs the plans."""
        return FlakyExecutor(workload.config, launches_ahead=workload.launches_ahead)

    @property
    def is_over(self) -> bool:
        return not (self.arrivals or self.core.has_requests or self.core.num_plans_in_flight)

    def add(self) -> None:
        """The next request, once its client knows that no other lives under its id."""
        self.driver.receive()
        request = self.arrivals[0] if self.arrivals else None
        if request is None or any(_is_same(life.request, request) for life in self._live()):
            return
        del self.arrivals[0]
        log = self.driver.listen(request.client_index, request.request_id)
        self.lives.append(Life(request, log))
        self.core.add(request)
        self._check()

    def abort(self, index: int) -> None:
        """Some request that lives as far as its client knows."""
        self.driver.receive()
        live = self._live()
        if live:
            life = live[index % len(live)]
            life.is_aborted = True
            self.core.abort(life.request.client_index, [life.request.request_id])
            self._check()

    def schedule(self) -> None:
        if self.driver.can_schedule:
            self.driver.schedule()
            self._check()

    def launch(self) -> None:
        if self.driver.can_launch:
            self.driver.launch()
            self._check()

    def collect(self) -> None:
        if self.driver.can_collect:
            self.driver.collect()
            self._check()

    def fail_launch(self, index: int) -> None:
        """The next plan launched, by one of its rows."""
        self.executor.next_faults["launch"] = index

    def fail_collect(self, index: int) -> None:
        """The next plan collected, by one of its rows."""
        self.executor.next_faults["collect"] = index

    def receive(self) -> None:
        self.driver.receive()

    def pause(self) -> None:
        self.core.pause(PauseMode.KEEP)

    def resume(self) -> None:
        self.core.resume()

    def preempt_all(self) -> None:
        """Only while nothing is in flight."""
        if not self.core.num_plans_in_flight:
            self.core.preempt_all()
            self._check()

    def reset_prefix_cache(self) -> None:
        """Only while nothing is in flight; whoever runs is preempted."""
        if not self.core.num_plans_in_flight:
            assert self.core.reset_prefix_cache(reset_running=True)
            assert self.core.statistics().num_cached_blocks == 0
            self._check()

    def finish(self) -> None:
        """All that is left, in the plainest order."""
        self.core.resume()
        while not self.is_over:
            self.add()
            self.schedule()
            self.schedule()
            self.launch()
            self.collect()
        self.driver.receive()

    def check_against_solo(self) -> None:
        """Every life heard what it hears alone, or a beginning of that if it was ended early."""
        statistics = self.core.statistics()
        assert statistics.num_free_blocks == statistics.num_blocks
        for life in self.lives:
            request, log = life.request, life.log
            solo = self.solo(life)
            assert log.token_ids == solo.token_ids[: len(log.token_ids)], request
            if life.is_aborted:
                assert log.finish_reason is None, request
            elif log.finish_reason is FinishReason.ERROR:
                assert self.executor.num_faults, request
            else:
                assert log.finish_reason is solo.finish_reason, request
                assert log.token_ids == solo.token_ids, request
                assert log.outputs[-1].stop_reason == solo.outputs[-1].stop_reason
            assert request.request_id in self.driver.finished_ids[request.client_index]
            assert self.num_cached_tokens(life) <= self._num_shared_tokens(life), request

    def num_cached_tokens(self, life: Life) -> int:
        """Tokens that a life found in the prefix cache, as its client heard."""
        heard = [output.prefill_stats for output in life.log.outputs if output.prefill_stats]
        return heard[0].num_cached_tokens if heard else 0

    def _num_shared_tokens(self, life: Life) -> int:
        """Tokens that a life may have found: all but its last, and such as another one had too.

        What another had before it was aborted nobody heard, so its solo run tells.
        """
        mine = life.request.prompt_token_ids or []
        others = [
            [*(other.request.prompt_token_ids or []), *self.solo(other).token_ids]
            for other in self.lives
            if other is not life and _same_source(other.request, life.request)
        ]
        if not self.may_read_cache(life.request):
            return 0
        return min(len(mine) - 1, max((_num_common(mine, theirs) for theirs in others), default=0))

    def may_read_cache(self, request: EngineCoreRequest) -> bool:
        """Whether anything of a request may come from the cache."""
        params = request.sampling_params
        assert params is not None
        return self.workload.config.enable_prefix_caching and not params.skip_reading_prefix_cache

    def solo(self, life: Life) -> RequestLog:
        """What a request generates alone."""
        if life.solo is None:
            life.solo = run_alone(life.request, self.core.max_model_len)
        return life.solo

    def outcomes(self) -> list[tuple[list[int], FinishReason | None] | None]:
        """What each request came to, in the order of their coming; None if it was ended early."""
        return [
            None if life.is_ended_early else (life.log.token_ids, life.log.finish_reason)
            for life in self.lives
        ]

    def _live(self) -> list[Life]:
        return [life for life in self.lives if not life.is_over]

    def _check(self) -> None:
        self.core.check_integrity()
        self._num_moves += 1
        assert self._num_moves <= MAX_MOVES, f"no end after {MAX_MOVES} moves"


def make_request(
    index: int,
    prompt: list[int],
    *,
    max_tokens: int,
    min_tokens: int,
    stops: bool,
    eos: bool,
    salt: str | None = None,
    priority: int = 0,
    reads_cache: bool = True,
    prompt_logprobs: int | None = None,
    adapter: LoRARequest | None = None,
) -> EngineCoreRequest:
    """A request; the clients take turns and use the same three ids again and again."""
    params = SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        min_tokens=min(min_tokens, max_tokens),
        eos_token_id=3 if eos else None,
        stop_token_ids=[5, 7] if stops else None,
        skip_reading_prefix_cache=None if reads_cache else True,
        prompt_logprobs=prompt_logprobs,
    )
    return EngineCoreRequest(
        f"r{index // NUM_CLIENTS % 3}",
        prompt,
        None,
        params,
        None,
        float(index // 3),
        adapter,
        salt,
        None,
        client_index=index % NUM_CLIENTS,
        priority=priority,
    )


def make_config(
    *,
    max_model_len: int,
    block_size: int,
    num_full_requests: int,
    num_more_blocks: int,
    **limits: Any,
) -> EngineConfig:
    """Limits whose pool holds so many requests of full length and some blocks more."""
    return EngineConfig(
        executor="kv-checking",
        max_model_len=max_model_len,
        block_size=block_size,
        num_blocks=num_full_requests * -(-max_model_len // block_size) + num_more_blocks,
        **limits,
    )


def make_core(config: EngineConfig, executor: Executor) -> EngineCore:
    """A core whose clock counts calls."""
    ticks = count()
    return EngineCore(
        config, executor.load(), num_clients=NUM_CLIENTS, clock=lambda: float(next(ticks))
    )


def run_alone(request: EngineCoreRequest, max_model_len: int) -> RequestLog:
    """The oracle: one request in an ample pool, each step awaited."""
    config = EngineConfig(
        executor="kv-checking", max_model_len=max_model_len, max_num_seqs=1, enable_lora=True
    )
    executor = KVCheckingExecutor(config, vocab_size=VOCAB_SIZE)
    driver = CoreDriver(make_core(config, executor), executor, pipeline_depth=1)
    log = driver.listen(request.client_index, request.request_id)
    driver.core.add(request)
    driver.run_until_idle()
    return log


def _is_same(first: EngineCoreRequest, second: EngineCoreRequest) -> bool:
    return (first.client_index, first.request_id) == (second.client_index, second.request_id)


def _same_source(first: EngineCoreRequest, second: EngineCoreRequest) -> bool:
    """Whether what one has computed may be the other's."""
    return (first.cache_salt, first.lora_request) == (second.cache_salt, second.lora_request)


def _num_common(first: list[int], second: list[int]) -> int:
    """How many tokens two texts begin with alike."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
