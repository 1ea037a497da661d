"""Random workloads for the core, and random orders of moves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.stateful.core_workloads import VOCAB_SIZE, Workload, make_config, make_request
from trio_engine.requests import LoRARequest

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from tests.stateful.core_workloads import WorkloadRun
    from trio_engine.requests import EngineCoreRequest

ADAPTERS = [LoRARequest(f"adapter-{number}", number, f"/adapters/{number}") for number in (1, 2, 3)]

Source = tuple[str | None, LoRARequest | None]
"""Salt and adapter of a request."""


def draw_workload(rng: random.Random, adapters: Sequence[LoRARequest] = ADAPTERS) -> Workload:
    """At random: pools from barely one request to ample, chunks from 1 token up.

    Most prompts begin like one of two texts. What has been computed may be shared by requests of
    one salt and adapter: a workload has few such sources, so that there is something to share.
    """
    max_model_len = rng.choice([8, 20, 48])
    config = make_config(
        max_model_len=max_model_len,
        block_size=rng.choice([1, 1, 2, 4, 16]),
        num_full_requests=rng.choice([1, 1, 1, 1, 3]),
        num_more_blocks=rng.randint(0, 2),
        max_num_seqs=rng.choice([1, 3, 8, 8, 8]),
        max_num_batched_tokens=rng.choice([1, 3, 8, 64, 64]),
        pipeline_depth=rng.choice([1, 2, 2]),
        long_prefill_token_threshold=rng.choice([0, 0, 0, 2, 5]),
        scheduling_policy=rng.choice(["fcfs", "priority"]),
        enable_lora=True,
        max_loras=rng.choice([1, 2, 2]),
    )
    texts = [[rng.randrange(VOCAB_SIZE) for _ in range(max_model_len)] for _ in range(2)]
    sources: list[Source] = rng.choice(
        [
            [(None, None)],
            [(None, None), ("salt", None), ("pepper", None)],
            [(None, None), (None, adapters[0])],
            [(None, None), *((None, adapter) for adapter in adapters)],
            [("salt", adapters[0]), ("salt", adapters[1]), (None, adapters[0])],
        ]
    )
    return Workload(
        config=config,
        launches_ahead=rng.random() < 0.5,
        requests=[
            _draw_request(rng, index, texts, rng.choice(sources))
            for index in range(rng.randint(2, 12))
        ],
    )


def _draw_request(
    rng: random.Random, index: int, texts: list[list[int]], source: Source
) -> EngineCoreRequest:
    text = rng.choice(texts)
    prompt_length = min(rng.choice([1, 2, 3, 4, 5, 9, 12, 30]), len(text) - 1)
    num_own = rng.choice([0, 0, 1, 2, prompt_length])
    own = [rng.randrange(VOCAB_SIZE) for _ in range(min(num_own, prompt_length))]
    return make_request(
        index,
        text[: prompt_length - len(own)] + own,
        max_tokens=rng.choice([1, 2, 5, 8, 30, 100, 100, 100]),
        min_tokens=rng.randint(0, 3),
        stops=rng.random() < 0.2,
        eos=rng.random() < 0.2,
        salt=source[0],
        priority=rng.choice([0, 0, 1, -1]),
        reads_cache=rng.random() < 0.9,
        prompt_logprobs=rng.choice([None] * 9 + [0]),
        adapter=source[1],
    )


def run_at_random(run: WorkloadRun, rng: random.Random) -> None:
    """Makes moves at random until nothing is left to do."""
    arrival_rate = rng.choice([0.05, 0.5, 1.0, 1.0])
    abort_rate = rng.choice([0.0, 0.01, 0.03])
    control_rate = rng.choice([0.0, 0.0, 0.02])
    fault_rate = rng.choice([0.0, 0.01])
    # Where a plan that preempts is in flight is where most can go wrong.
    after_preemption_rate = rng.choice([0.0, 0.5])
    num_preemptions = 0
    while not run.is_over:
        if rng.random() < arrival_rate or not run.core.has_requests:
            run.add()
        if rng.random() < abort_rate:
            run.abort(rng.randrange(8))
        if rng.random() < control_rate:
            rng.choice([run.pause, run.preempt_all, run.reset_prefix_cache])()
        preempts = run.core.statistics().num_preemptions > num_preemptions
        num_preemptions = run.core.statistics().num_preemptions
        if rng.random() < (after_preemption_rate if preempts else fault_rate):
            rng.choice([run.fail_launch, run.fail_collect, run.fail_collect])(rng.randrange(8))
        moves = [
            move
            for move, is_possible in (
                (run.schedule, run.driver.can_schedule and not run.core.pause_state.is_on),
                (run.launch, run.driver.can_launch),
                (run.collect, run.driver.can_collect),
            )
            if is_possible
        ]
        rng.choice(moves or [run.resume])()
        if rng.random() < 0.5:
            run.receive()
    run.receive()
