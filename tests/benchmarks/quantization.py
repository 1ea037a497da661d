"""What quantized weights cost in accuracy and save in time: the built-in model on this CPU.

    python -m tests.benchmarks.quantization
    python -m tests.benchmarks.quantization --rounds 60 --requests 1,4,8,32

A step of the model in float32, with int8 and with int4 weights: one process, the same threads, one
step after the other in every round, so that what else the machine does hits all three; medians. A
step decodes one token of every request, its choice by the highest logit included. Then the prefill
of one prompt in the same way, and the error over a fixed text.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import TYPE_CHECKING

from tests.benchmarks.figures import Report
from trio_engine.executor.openmp import short_spins

with short_spins():  # as an engine does
    import torch

from tests.model.decoding import CPU, GREEDY, PlanDriver, RunnerExecutor, load_decoder
from tests.model.quantization_error import FixedText
from trio_engine.checkpoint import locate_model
from trio_engine.config import EngineConfig
from trio_engine.model.linear_backend import choose_linear_backend
from trio_engine.model.loader import open_checkpoint

if TYPE_CHECKING:
    from trio_engine.config import QuantizationName

QUANTIZATIONS: tuple[QuantizationName | None, ...] = (None, "int8", "int4")
MAX_MODEL_LEN = 512
BLOCK_SIZE = 16
PROMPT_TOKENS = 16
FIRST_TOKEN_ID = 1000


class Model:
    """The built-in model and requests that are always decoding."""

    def __init__(self, quantization: QuantizationName | None, max_requests: int) -> None:
        num_blocks = (max_requests + 1) * MAX_MODEL_LEN // BLOCK_SIZE
        config = EngineConfig(
            max_model_len=MAX_MODEL_LEN, max_num_seqs=max_requests, num_blocks=num_blocks
        )
        files = locate_model("smollm2")
        model = open_checkpoint(files).config
        backend = choose_linear_backend("auto", model, CPU, torch.float32)
        decoder = load_decoder(files, quantization=quantization, linear_backend=backend)
        executor = RunnerExecutor(decoder, config, launches_ahead=False)
        self.name = quantization or "float32"
        self._driver = PlanDriver(executor, num_blocks, BLOCK_SIZE)

    def begin(self, num_requests: int, num_tokens: int) -> None:
        """Computes the prompts of so many requests."""
        for slot in range(num_requests):
            prompt = range(FIRST_TOKEN_ID + slot, FIRST_TOKEN_ID + slot + num_tokens)
            self._driver.add(slot, prompt, GREEDY, room=MAX_MODEL_LEN - num_tokens)
        self._driver.step(dict.fromkeys(range(num_requests), num_tokens))

    def decode(self, num_requests: int) -> None:
        """Computes a token of each."""
        self._driver.step(dict.fromkeys(range(num_requests), 1))

    def end(self, num_requests: int) -> None:
        for slot in range(num_requests):
            self._driver.finish(slot)


def timed_s(times_s: list[float], started: float) -> None:
    times_s.append(time.perf_counter() - started)


def measure_decode(models: list[Model], num_requests: int, rounds: int, report: Report) -> None:
    """Reports a step of each model, and how many times faster it is than float32."""
    times_s: dict[str, list[float]] = {model.name: [] for model in models}
    for model in models:
        model.begin(num_requests, PROMPT_TOKENS)
    for _ in range(rounds):
        for model in models:
            started = time.perf_counter()
            model.decode(num_requests)
            timed_s(times_s[model.name], started)
    for model in models:
        model.end(num_requests)
    add_times(f"decode, {num_requests} requests", times_s, report)


def measure_prefill(models: list[Model], num_tokens: int, rounds: int, report: Report) -> None:
    times_s: dict[str, list[float]] = {model.name: [] for model in models}
    for _ in range(rounds):
        for model in models:
            started = time.perf_counter()
            model.begin(1, num_tokens)
            timed_s(times_s[model.name], started)
            model.end(1)
    add_times(f"prefill, {num_tokens} tokens", times_s, report)


def add_times(what: str, times_s: dict[str, list[float]], report: Report) -> None:
    base, *others = times_s
    for name, times in times_s.items():
        report.add(f"{what}: a step, {name}", 1000 * statistics.median(times), "ms")
    for name in others:
        ratios = [a / b for a, b in zip(times_s[base], times_s[name], strict=True)]
        report.add(f"{what}: {name} is faster", statistics.median(ratios), "times")


def measure_error(num_sequences: int, report: Report) -> None:
    text = FixedText(num_sequences)
    report.note(f"error over {text.num_tokens} tokens")
    for quantization in QUANTIZATIONS:
        if quantization is not None:
            error = text.error_of(quantization)
            report.add(f"{quantization}: mean divergence", error.divergence, "nats")
            report.add(f"{quantization}: same greedy token", 100 * error.agreement, "%")
            increase = 100 * (error.perplexity_ratio - 1)
            report.add(f"{quantization}: perplexity rises by", increase, "%")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--requests", default="1,8", help="decoding at once, each in turn")
    parser.add_argument("--prompt-tokens", type=int, default=256, help="of the prefill")
    parser.add_argument("--sequences", type=int, default=20, help="of the text for the error")
    options = parser.parse_args(arguments)
    report = Report("quantization")
    counts = [int(count) for count in options.requests.split(",")]
    models = [Model(quantization, max(counts)) for quantization in QUANTIZATIONS]
    for count in counts:
        measure_decode(models, count, options.rounds, report)
    measure_prefill(models, options.prompt_tokens, max(1, options.rounds // 8), report)
    del models
    measure_error(options.sequences, report)
    return report.exit_status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
