"""What a load asks of an engine: how many requests, how long, and when.

Pure. The same workload and seed make the same requests, whatever engine gets them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from trio_engine.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

FIRST_TOKEN_ID = 100
NUM_TOKEN_IDS = 30_000
"""Prompts are drawn from these ids: no special tokens, and within the vocabularies of all models
that are likely to be measured (that of SmolLM2 has 49,152)."""

MIX_MEAN_PROMPT_TOKENS = 161.0
MIX_MEAN_OUTPUT_TOKENS = 338.0
"""Means that the vLLM paper (Kwon et al., 2023) gives for conversations of ShareGPT."""

MIX_SIGMA = 1.0
"""Of the logarithm of a length: a tenth of the lengths are more than twice the mean."""

MAX_MIX_TOKENS = 1024
"""Longer prompts and outputs of the mix are cut here, as vLLM's own benchmark drops them."""


MAX_NUMBER = 10_000_000
"""All requests are made and encoded beforehand: more would not fit into memory."""


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Requests, and how they come.

    Attributes:
        name: for tables.
        num_requests: in all.
        concurrency: requests that are open at once in a closed loop: one that ends is followed by
            the next. Not used with ``rate``.
        prompt_tokens: of each request, or, in the mix, its mean.
        output_tokens: likewise.
        is_mix: lengths are drawn from a log-normal distribution, else all are the same.
        rate: requests per second at random moments (Poisson), None for a closed loop.
        seed: of all that is drawn.
    """

    name: str
    num_requests: int
    concurrency: int = 1
    prompt_tokens: float = 32
    output_tokens: float = 32
    is_mix: bool = False
    rate: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_requests", "concurrency", "prompt_tokens", "output_tokens"):
            if not 1 <= getattr(self, name) <= MAX_NUMBER:  # NaN fails it too
                raise ConfigError(f"{name} must be 1 to {MAX_NUMBER}, got {getattr(self, name)}")
        if self.seed < 0:
            raise ConfigError(f"seed must be 0 or more, got {self.seed}")
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise ConfigError(f"rate must be above 0 and finite, got {self.rate}")

    @property
    def warm_up(self) -> Workload:
        """A short one of the same kind, to run first: as many at once, and few tokens."""
        return msgspec.structs.replace(
            self,
            num_requests=min(self.num_requests, self.concurrency),
            output_tokens=min(self.output_tokens, 20),
            rate=None,
            seed=self.seed + 1,
        )


class Ask(msgspec.Struct, frozen=True):
    """One request of a workload: its prompt and how many tokens it wants, and when it comes.

    ``arrival_s`` counts from the start; 0 in a closed loop.
    """

    prompt_token_ids: list[int]
    output_tokens: int
    arrival_s: float = 0.0


def make_asks(workload: Workload, max_model_len: int) -> list[Ask]:
    """All requests of a workload, in the order in which they come.

    Raises:
        ConfigError: a request of this length is more than the engine serves.
    """
    random = np.random.default_rng(workload.seed)
    count = workload.num_requests
    if workload.is_mix:
        limit = min(MAX_MIX_TOKENS, max_model_len // 2)
        prompts = _draw_lengths(random, workload.prompt_tokens, count, limit)
        outputs = _draw_lengths(random, workload.output_tokens, count, limit)
    else:
        prompts = np.full(count, int(workload.prompt_tokens))
        outputs = np.full(count, int(workload.output_tokens))
        if prompts[0] + outputs[0] > max_model_len:
            raise ConfigError(
                f"{prompts[0]} + {outputs[0]} tokens are more than the engine's max_model_len,"
                f" {max_model_len}"
            )
    arrivals = np.zeros(count)
    if workload.rate is not None:
        arrivals = np.cumsum(random.exponential(1 / workload.rate, count))
    return [
        Ask(_draw_prompt(random, int(prompt)), int(output), float(arrival))
        for prompt, output, arrival in zip(prompts, outputs, arrivals, strict=True)
    ]


def _draw_lengths(
    random: np.random.Generator, mean: float, count: int, limit: int
) -> NDArray[np.int64]:
    mu = np.log(mean) - MIX_SIGMA**2 / 2  # so that the mean is the one asked for, before the cut
    return np.clip(np.round(random.lognormal(mu, MIX_SIGMA, count)), 1, limit).astype(np.int64)


def _draw_prompt(random: np.random.Generator, length: int) -> list[int]:
    # All different, so that none finds another's beginning in the prefix cache.
    ids: list[int] = random.integers(
        FIRST_TOKEN_ID, FIRST_TOKEN_ID + NUM_TOKEN_IDS, length
    ).tolist()
    return ids


def _closed(
    name: str, num_requests: int, concurrency: int, prompt_tokens: int, output_tokens: int
) -> Workload:
    return Workload(
        name=name,
        num_requests=num_requests,
        concurrency=concurrency,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
    )


WORKLOADS = {
    workload.name: workload
    for workload in (
        _closed("single", 4, 1, 32, 500),
        _closed("conc32", 256, 32, 128, 64),
        _closed("conc256", 1024, 256, 128, 32),
        _closed("conc256x128", 1024, 256, 128, 128),
        _closed("churn", 2000, 64, 16, 1),
        _closed("real1", 2, 1, 64, 64),
        _closed("real8", 16, 8, 64, 48),
        _closed("real32", 48, 32, 128, 32),
    )
}
"""Workloads by name: one stream, 32 and 256 at once, one-token requests, and for real models."""
