"""How near the model comes to what the machine can do: decoding to memory, prefill to arithmetic.

    python -m tests.benchmarks.model_limits
    python -m tests.benchmarks.model_limits --rounds 40 --prompt-tokens 256

A step that decodes one request reads every weight once; it is compared with a loop that only adds
up the same tensors. A step that computes a prompt is compared with its matrix products alone, on
the same weights. Both sides of a comparison take turns, with the same threads, and medians are
compared. The sampled token is greedy; contexts are short, as they are when an answer begins.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from typing import TYPE_CHECKING

from tests.benchmarks.figures import Report
from trio_engine.executor.openmp import short_spins

with short_spins():  # as an engine does
    import torch

from torch.nn import functional

from trio_engine.checkpoint import locate_model
from trio_engine.core.plan import NewRow, StepPlan
from trio_engine.model.decoder import Decoder
from trio_engine.model.kv_cache import KVCache, KVCacheShape
from trio_engine.model.linear_backend import choose_linear_backend
from trio_engine.model.loader import open_checkpoint
from trio_engine.model.runner import ModelRunner
from trio_engine.model.weights import WeightForm, load_weights
from trio_engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from trio_engine.model.weights import DecoderWeights

MAX_DECODE_RATIO = 1 / 0.8
MAX_PREFILL_RATIO = 1 / 0.85
BLOCK_SIZE = 16
MAX_MODEL_LEN = 1024
FIRST_TOKEN_ID = 1000


class Model:
    """The built-in model in float32 as an engine has it, and its weights as tensors beside."""

    def __init__(self) -> None:
        device, dtype = torch.device("cpu"), torch.float32
        checkpoint = open_checkpoint(locate_model("smollm2"))
        config = checkpoint.config
        self.weights = load_weights(config, checkpoint.tensors(), dtype, device)
        self.linear_backend = choose_linear_backend("auto", config, device, dtype)
        form = WeightForm(linear_backend=self.linear_backend)
        shape = KVCacheShape.of(config, BLOCK_SIZE, dtype)
        cache = KVCache(shape, 2 * MAX_MODEL_LEN // BLOCK_SIZE, device, dtype)
        self._runner = ModelRunner(
            Decoder(config, form.apply(self.weights)),
            cache,
            max_num_seqs=1,
            max_model_len=MAX_MODEL_LEN,
            launches_ahead=False,
        )
        self._num_plans = 0

    def prefill(self, num_tokens: int) -> None:
        """Computes a new prompt in the place of what was there, and draws its first token."""
        row = NewRow(
            slot=0,
            request_id="r",
            token_ids=list(range(FIRST_TOKEN_ID, FIRST_TOKEN_ID + num_tokens)),
            num_prompt_tokens=num_tokens,
            num_computed_tokens=0,
            block_ids=list(range(MAX_MODEL_LEN // BLOCK_SIZE)),
            sampling_params=SamplingParams(temperature=0.0),
        )
        self._run(num_tokens, [row])

    def decode(self) -> None:
        """Computes and draws one more token."""
        self._run(1, [])

    def _run(self, num_tokens: int, new_rows: list[NewRow]) -> None:
        plan = StepPlan(
            plan_id=self._num_plans,
            slots=[0],
            num_scheduled_tokens=[num_tokens],
            new_rows=new_rows,
        )
        self._num_plans += 1
        self._runner.launch(plan).settle()


def matrices(weights: DecoderWeights) -> list[Tensor]:
    """Those of the layers, in the order of a forward pass, then the head; all are tensors."""
    layers = [(layer.qkv, layer.out, layer.gate_up, layer.down) for layer in weights.layers]
    every = [*itertools.chain.from_iterable(layers), weights.head]
    return [matrix for matrix in every if isinstance(matrix, torch.Tensor)]


def median_times_s(rounds: int, *functions: Callable[[], object]) -> list[float]:
    """Of each function, one call after the other in every round; the first round does not count."""
    times_s: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds + 1):
        for function, taken in zip(functions, times_s, strict=True):
            started = time.perf_counter()
            function()
            taken.append(time.perf_counter() - started)
    return [statistics.median(taken[1:]) for taken in times_s]


@torch.inference_mode()
def measure_decode(model: Model, rounds: int, report: Report) -> None:
    tensors = matrices(model.weights)
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    model.prefill(16)
    step_s, read_s = median_times_s(
        rounds, model.decode, lambda: [tensor.sum() for tensor in tensors]
    )
    report.add("decode: a step", 1000 * step_s, "ms")
    report.add("decode: reading the weights", 1000 * read_s, "ms")
    report.add("decode: bandwidth of reading", num_bytes / read_s / 1e9, "GB/s")
    report.add("decode: a step over reading", step_s / read_s, "", below=MAX_DECODE_RATIO)


@torch.inference_mode()
def measure_prefill(model: Model, num_tokens: int, rounds: int, report: Report) -> None:
    products = matrices(model.weights)[:-1]
    inputs = {size: torch.randn(num_tokens, size) for size in {m.shape[1] for m in products}}
    num_flops = sum(2 * num_tokens * matrix.numel() for matrix in products)
    step_s, products_s = median_times_s(
        rounds,
        lambda: model.prefill(num_tokens),
        lambda: [functional.linear(inputs[matrix.shape[1]], matrix) for matrix in products],
    )
    report.add(f"prefill of {num_tokens}: a step", 1000 * step_s, "ms")
    report.add(f"prefill of {num_tokens}: its products alone", 1000 * products_s, "ms")
    report.add(f"prefill of {num_tokens}: products", num_flops / products_s / 1e9, "GFLOP/s")
    ratio = step_s / products_s
    report.add(
        f"prefill of {num_tokens}: a step over its products", ratio, "", below=MAX_PREFILL_RATIO
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[256, 512])
    options = parser.parse_args(arguments)
    report = Report(f"the built-in model with {torch.get_num_threads()} threads")
    model = Model()
    report.note(f"linear backend: {model.linear_backend}")
    measure_decode(model, options.rounds, report)
    for num_tokens in options.prompt_tokens:
        measure_prefill(model, num_tokens, max(1, options.rounds // 4), report)
    return report.exit_status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
