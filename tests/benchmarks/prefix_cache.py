"""How much sooner the first token of a prompt comes that the engine has seen before.

    python -m tests.benchmarks.prefix_cache                     # the built-in model, 1,000 tokens
    python -m tests.benchmarks.prefix_cache --length 200 --prompts 2

Each prompt is other tokens, sent twice to an idle engine by a client in this process. The time is
from the call until the first token. Also measured: what the hash of a block costs.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from typing import TYPE_CHECKING, NamedTuple

import trio

from tests.benchmarks.figures import Report, spread
from trio_engine.client.launcher import open_engine
from trio_engine.config import EngineConfig
from trio_engine.core.block_hash import BlockHasher
from trio_engine.core.request import Request
from trio_engine.requests import EngineCoreRequest
from trio_engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from trio_engine.client.base import EngineClient

MAX_SHARE = 1 / 5
"""Of the first call's time that the second one may take."""

NUM_NEW_TOKENS = 2
VOCAB_SIZE = 49_000
BLOCK_SIZE = 16


async def measure_model(length: int, num_prompts: int, report: Report) -> None:
    """Reports the times of first and second calls, and their ratio."""
    config = EngineConfig(model="smollm2", max_num_seqs=4, max_model_len=length + 64)
    rng = random.Random(0)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for _ in range(num_prompts)]
    async with open_engine(config) as engine:
        await first_token(engine, list(range(1, 33)))  # warms up both processes
        calls = [[await first_token(engine, prompt) for _ in range(2)] for prompt in prompts]
    first, second = ([call[n].seconds for call in calls] for n in (0, 1))
    report.note(f"{num_prompts} prompts of {length} tokens; lowest / median / highest, s")
    report.note(f"first call   {spread(first)}")
    report.note(f"second call  {spread(second)}")
    assert all(before.num_cached_tokens == 0 for before, _ in calls), "its prompt was known"
    num_cached = min(again.num_cached_tokens for _, again in calls)
    report.note(f"of the second call's tokens {num_cached} were cached")
    shares = [again.seconds / before.seconds for before, again in calls]
    report.add("the second call's share, median", statistics.median(shares), "", below=MAX_SHARE)


class FirstToken(NamedTuple):
    """How long it took, and how much of its prompt was not computed."""

    seconds: float
    num_cached_tokens: int


async def first_token(engine: EngineClient, prompt: list[int]) -> FirstToken:
    """From the call until the first token; the request then ends by itself."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
    started = trio.current_time()
    first: FirstToken | None = None
    async with engine.generate(prompt, params) as stream:
        async for output in stream:
            if first is None:
                assert output.num_cached_tokens is not None
                first = FirstToken(trio.current_time() - started, output.num_cached_tokens)
    assert first is not None
    return first


def measure_hash(report: Report) -> None:
    """Reports the time of one block's hash, within a prompt of 4,096 tokens."""
    prompt = [number * 7 % VOCAB_SIZE for number in range(4096)]
    params = SamplingParams()
    source = EngineCoreRequest("r", prompt, None, params, None, 0.0, None, None, None)
    hasher, times_us = BlockHasher(BLOCK_SIZE), []
    for _ in range(200):
        request = Request(source, params, 8192)
        started = time.perf_counter()
        hasher.hashes(request, 4096 // BLOCK_SIZE)
        times_us.append(1e6 * (time.perf_counter() - started) * BLOCK_SIZE / 4096)
    report.add(f"hash of a block of {BLOCK_SIZE} tokens", statistics.median(times_us), "us")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=1000, help="tokens of a prompt")
    parser.add_argument("--prompts", type=int, default=5)
    options = parser.parse_args(arguments)
    report = Report("prefix cache")
    measure_hash(report)
    trio.run(measure_model, options.length, options.prompts, report)
    return report.exit_status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
