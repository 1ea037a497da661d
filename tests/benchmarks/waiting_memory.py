"""What a request that waits costs an engine in memory.

    python -m tests.benchmarks.waiting_memory
    python -m tests.benchmarks.waiting_memory --requests 2000 --prompt-tokens 4000

One request runs and all others wait behind it. The engine's memory in RAM is read before they come
and once they are all in its queue. Prompts differ, as those of users do.
"""

from __future__ import annotations

import argparse
import random
import sys

import trio

from tests.benchmarks.engines import null_command, open_wire_engine
from tests.benchmarks.figures import Report, rss_bytes
from trio_engine.executor.null import VOCAB_SIZE

MAX_BYTES = 16 * 1024
"""For 1,000 prompt tokens: as 32-bit integers these take 4,000 bytes."""

TOKENS_OF_LIMIT = 1000
MAX_TOKENS = 1000
STEP_MS = 50.0
"""So slow that the running request outlives the measurement."""


async def measure(num_requests: int, num_prompt_tokens: int, report: Report) -> None:
    dice = random.Random(0)
    command = null_command(f"--null-step-ms={STEP_MS}", "--max-num-seqs=1")
    async with open_wire_engine(command) as (front_end, engine):
        pid = engine.process.pid
        await front_end.add("running", [1, 2, 3], max_tokens=MAX_TOKENS, ignore_eos=True)
        await front_end.wait_num_tokens("running", 1)
        before = rss_bytes(pid)
        for number in range(num_requests):
            prompt = dice.choices(range(VOCAB_SIZE), k=num_prompt_tokens)
            await front_end.add(f"waiting-{number}", prompt, max_tokens=MAX_TOKENS)
        await front_end.call_utility("is_sleeping")  # answered once all of them are in
        per_request = (rss_bytes(pid) - before) / num_requests
    limit = MAX_BYTES * num_prompt_tokens / TOKENS_OF_LIMIT
    report.add(
        f"memory of a waiting request of {num_prompt_tokens} tokens",
        per_request / 1024,
        "KB",
        below=limit / 1024,
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--prompt-tokens", type=int, default=TOKENS_OF_LIMIT)
    options = parser.parse_args(arguments)
    report = Report(f"{options.requests} requests that wait")
    trio.run(measure, options.requests, options.prompt_tokens, report)
    return report.exit_status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
