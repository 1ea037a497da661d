"""Whether rows that follow a grammar run as fast as free ones, in one engine without a model.

    python -m tests.benchmarks.structured
    python -m tests.benchmarks.structured --rows 128 --step-ms 10

The null executor takes a fixed time for each step, as a device would, and draws for a structured
row a token that its grammar allows; the vocabulary is SmolLM2's. A row that sat out every second
plan would show as a ratio of 2. Free and structured rounds take turns, and the best of each
counts: what else the machine does only makes a round slower.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import TYPE_CHECKING

import trio

from tests.benchmarks.figures import Report
from trio_engine.client.launcher import open_engine
from trio_engine.config import EngineConfig
from trio_engine.sampling_params import SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from trio_engine.client.base import EngineClient

MAX_RATIO = 1.25
NUM_ROUNDS = 3
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 4, "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": PERSON, "minItems": 1000}
"""Longer than any round, so that all rows run to the same length."""


def make_params(num_tokens: int, *, is_structured: bool) -> SamplingParams:
    """Options of a row that draws so many tokens."""
    structured = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
    return SamplingParams(
        temperature=0.0,
        max_tokens=num_tokens,
        ignore_eos=True,
        detokenize=False,
        structured_outputs=structured if is_structured else None,
    )


async def run_round(engine: EngineClient, num_rows: int, params: SamplingParams) -> float:
    """Tokens per second of rows that run at once, from the first token on."""
    started: list[float] = []
    num_tokens = 0

    async def run(number: int) -> None:
        nonlocal num_tokens
        async with engine.generate([number, 2, 3], params) as stream:
            async for output in stream:
                started.append(trio.current_time())
                if output.finished:
                    num_tokens += output.num_output_tokens

    async with trio.open_nursery() as nursery:
        for number in range(num_rows):
            nursery.start_soon(run, number)
    return num_tokens / (trio.current_time() - started[0])


async def measure(report: Report, *, num_rows: int, step_ms: float, num_tokens: int) -> None:
    """Prints the best round of each kind, and their ratio."""
    config = EngineConfig(
        executor="null", null_step_ms=step_ms, tokenizer="smollm2", grammar_timeout_s=60.0
    )
    free = make_params(num_tokens, is_structured=False)
    structured = make_params(num_tokens, is_structured=True)
    async with open_engine(config) as engine:
        # Loads the tokenizer and the library, and has the schema tried.
        await run_round(engine, num_rows, make_params(1, is_structured=True))
        rates: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(NUM_ROUNDS):
            for params in (free, structured):
                is_structured = params is structured
                rates[is_structured].append(await run_round(engine, num_rows, params))
    best_free, best_structured = max(rates[False]), max(rates[True])
    report.add("free rows", best_free, "tokens/s")
    report.add("structured rows", best_structured, "tokens/s")
    report.add("free / structured", best_free / best_structured, "", below=MAX_RATIO)


def main() -> int:
    """Parses the command line and measures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=64, metavar="N")
    parser.add_argument("--step-ms", type=float, default=20.0, metavar="MS")
    parser.add_argument("--tokens", type=int, default=150, metavar="N", help="of each row")
    options = parser.parse_args()
    report = Report(f"{options.rows} rows, steps of {options.step_ms:g} ms")
    trio.run(
        partial(
            measure,
            report,
            num_rows=options.rows,
            step_ms=options.step_ms,
            num_tokens=options.tokens,
        )
    )
    return report.exit_status


if __name__ == "__main__":
    sys.exit(main())
