"""Workloads: the same requests for every engine, of the lengths and at the moments asked for."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest

from trio_engine.bench.workload import (
    MAX_MIX_TOKENS,
    MIX_MEAN_OUTPUT_TOKENS,
    MIX_MEAN_PROMPT_TOKENS,
    WORKLOADS,
    Workload,
    make_asks,
)
from trio_engine.errors import ConfigError

MANY = 5_000


def test_requests_are_those_of_the_seed() -> None:
    workload = Workload(name="x", num_requests=20, rate=5.0, is_mix=True, seed=3)
    assert make_asks(workload, 2048) == make_asks(workload, 2048)
    other = msgspec.structs.replace(workload, seed=4)
    assert make_asks(other, 2048) != make_asks(workload, 2048)


@pytest.mark.parametrize("name", WORKLOADS)
def test_fixed_lengths_are_as_asked_and_no_two_prompts_begin_alike(name: str) -> None:
    workload = msgspec.structs.replace(WORKLOADS[name], num_requests=50)
    asks = make_asks(workload, 2048)
    assert {len(ask.prompt_token_ids) for ask in asks} == {workload.prompt_tokens}
    assert {ask.output_tokens for ask in asks} == {workload.output_tokens}
    assert len({tuple(ask.prompt_token_ids[:16]) for ask in asks}) == 50
    assert all(ask.arrival_s == 0 for ask in asks)


def test_arrivals_at_a_rate_come_at_random_moments_in_order() -> None:
    workload = Workload(name="x", num_requests=MANY, prompt_tokens=1, rate=50.0)
    arrivals = [ask.arrival_s for ask in make_asks(workload, 2048)]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(MANY / 50, rel=0.05)
    gaps = [after - before for before, after in pairwise(arrivals)]
    # Of a Poisson process the shares of gaps below and above the mean are known.
    assert sum(gap > 1 / 50 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.03)


def test_the_mix_has_the_means_asked_for_and_a_long_tail() -> None:
    workload = Workload(
        name="x",
        num_requests=2000,
        prompt_tokens=MIX_MEAN_PROMPT_TOKENS,
        output_tokens=MIX_MEAN_OUTPUT_TOKENS,
        is_mix=True,
    )
    asks = make_asks(workload, 4 * MAX_MIX_TOKENS)
    prompts = [len(ask.prompt_token_ids) for ask in asks]
    outputs = [ask.output_tokens for ask in asks]
    # What is cut at the upper end takes something off the means.
    assert sum(prompts) / len(prompts) == pytest.approx(MIX_MEAN_PROMPT_TOKENS, rel=0.1)
    assert sum(outputs) / len(outputs) == pytest.approx(MIX_MEAN_OUTPUT_TOKENS, rel=0.2)
    assert max(prompts) > 4 * MIX_MEAN_PROMPT_TOKENS
    assert min(prompts) < MIX_MEAN_PROMPT_TOKENS / 4
    assert max(outputs) == MAX_MIX_TOKENS
    assert min(*prompts, *outputs) >= 1


def test_the_mix_fits_into_a_small_engine() -> None:
    workload = Workload(
        name="x", num_requests=500, prompt_tokens=161, output_tokens=338, is_mix=True
    )
    assert all(
        len(ask.prompt_token_ids) + ask.output_tokens <= 65 for ask in make_asks(workload, 65)
    )


def test_what_an_engine_cannot_serve_is_refused_before_it_is_sent() -> None:
    with pytest.raises(ConfigError, match=r"32 \+ 500 tokens are more than .*, 100"):
        make_asks(WORKLOADS["single"], 100)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_requests": 0}, "num_requests must be 1 to 10000000, got 0"),
        ({"num_requests": 1, "concurrency": 0}, "concurrency must be 1 to 10000000, got 0"),
        ({"num_requests": 1, "output_tokens": 0}, "output_tokens must be 1 to 10000000, got 0"),
        ({"num_requests": 1, "rate": 0.0}, "rate must be above 0 and finite, got 0.0"),
    ],
)
def test_values_that_make_no_load_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Workload(name="x", **options)  # type: ignore[arg-type]  # values of several types


def test_the_warm_up_is_short_and_has_other_prompts() -> None:
    workload = WORKLOADS["conc32"]
    warm_up = workload.warm_up
    assert (warm_up.num_requests, warm_up.concurrency, warm_up.output_tokens) == (32, 32, 20)
    first = make_asks(workload, 2048)[0].prompt_token_ids
    assert make_asks(warm_up, 2048)[0].prompt_token_ids != first
