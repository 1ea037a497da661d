"""Whether outputs of SmolLM2 follow random JSON schemas, and come to their end.

    python -m tests.benchmarks.structured_schemas
    python -m tests.benchmarks.structured_schemas --schemas 1000 --seed 7 --temperature 1

Each request is a chat that asks for JSON by a schema of its own. Every output must end with STOP
and be valid by ``jsonschema``, which knows nothing of grammars.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import jsonschema
import trio

from tests.benchmarks.figures import Report
from tests.benchmarks.random_schemas import draw_schema
from trio_engine.client.launcher import open_engine
from trio_engine.config import EngineConfig
from trio_engine.errors import RequestFailedError
from trio_engine.outputs import FinishReason
from trio_engine.sampling_params import SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from trio_engine.client.base import EngineClient

# The first grammar waits until the library and the vocabulary are loaded.
CONFIG = EngineConfig(max_model_len=2048, max_num_seqs=16, num_blocks=2048, grammar_timeout_s=60.0)
MAX_TOKENS = 800
"""The longest of these outputs have some 300 tokens, if each is a letter."""


class Outcome:
    """What became of the requests."""

    def __init__(self) -> None:
        self.ends: Counter[str] = Counter()
        self.faults: list[str] = []
        self.num_tokens = 0

    def fail(self, schema: dict[str, Any], why: str) -> None:
        """Notes an output that is not as it should be."""
        self.faults.append(f"{why} by {json.dumps(schema)}")


async def ask(
    engine: EngineClient, schema: dict[str, Any], params: SamplingParams, outcome: Outcome
) -> None:
    """One request, and the judgement of its output."""
    prompt = f"Give me an example of JSON that follows this schema: {json.dumps(schema)}"
    try:
        output = await engine.complete([{"role": "user", "content": prompt}], params)
    except RequestFailedError as error:
        outcome.ends["error"] += 1
        outcome.fail(schema, str(error.reason))
        return
    assert output.finish_reason is not None
    outcome.ends[output.finish_reason.name.lower()] += 1
    outcome.num_tokens += output.num_output_tokens
    if output.finish_reason is not FinishReason.STOP:
        outcome.fail(schema, f"{output.finish_reason.name} after {output.text!r}")
        return
    try:
        jsonschema.validate(json.loads(output.text), schema)
    except (ValueError, jsonschema.ValidationError) as error:
        outcome.fail(schema, f"{output.text!r}: {error}")


async def run(
    *,
    num_schemas: int,
    seed: int,
    temperature: float,
    first: int = 0,
    config: EngineConfig = CONFIG,
) -> tuple[Outcome, float]:
    """Asks for all of them at once; what became of them, and seconds."""
    outcome = Outcome()
    async with open_engine(config) as engine:
        started = trio.current_time()
        async with trio.open_nursery() as nursery:
            for number in range(first, first + num_schemas):
                schema = draw_schema(random.Random(f"{seed} {number}"))
                params = SamplingParams(
                    temperature=temperature,
                    seed=number,
                    max_tokens=MAX_TOKENS,
                    structured_outputs=StructuredOutputsParams(
                        json=schema, disable_any_whitespace=True
                    ),
                )
                nursery.start_soon(ask, engine, schema, params, outcome)
        return outcome, trio.current_time() - started


def main() -> int:
    """Parses the command line and judges; 1 if an output is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemas", type=int, default=200, metavar="N")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="to go on from there")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--temperature", type=float, default=0.0)
    options = parser.parse_args()
    report = Report(f"{options.schemas} schemas from {options.first}, seed {options.seed}")
    outcome, took_s = trio.run(
        partial(
            run,
            num_schemas=options.schemas,
            seed=options.seed,
            first=options.first,
            temperature=options.temperature,
        )
    )
    for end, count in outcome.ends.items():
        report.add(f"ended by {end}", count, "requests")
    report.add("tokens of a request", outcome.num_tokens / options.schemas, "tokens")
    report.add("all of them", outcome.num_tokens / took_s, "tokens/s")
    for fault in outcome.faults:
        report.note(fault)
    report.add("outputs that are not as they should be", len(outcome.faults), "", below=1)
    return report.exit_status


if __name__ == "__main__":
    sys.exit(main())
