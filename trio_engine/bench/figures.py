"""The figures of a load: what came back, how fast, and what it cost.

Pure.
"""

from __future__ import annotations

import math
import statistics
from array import array
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from trio_engine.core.statistics import StepStatistics
from trio_engine.outputs import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from trio_engine.bench.workload import Workload

NUM_QUANTILES = 101


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds. ``quantiles`` are its 0th to 100th percentiles, empty if there are none."""

    count: int = 0
    mean_s: float = 0.0
    p50_s: float = 0.0
    p90_s: float = 0.0
    p99_s: float = 0.0
    max_s: float = 0.0
    quantiles: list[float] = msgspec.field(default_factory=list)


def distribution_of(values: array[float]) -> Distribution:
    """The distribution of times in seconds."""
    if not values:
        return Distribution()
    times = np.frombuffer(values, dtype=np.float64)
    quantiles = np.quantile(times, np.linspace(0, 1, NUM_QUANTILES))
    return Distribution(
        count=len(times),
        mean_s=float(times.mean()),
        p50_s=float(quantiles[50]),
        p90_s=float(quantiles[90]),
        p99_s=float(quantiles[99]),
        max_s=float(quantiles[100]),
        quantiles=[float(value) for value in quantiles],
    )


class LoadFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What one load gave.

    Attributes:
        workload: its name.
        concurrency: requests open at once, None if they came at a rate.
        rate: the rate that was asked for.
        num_requests: that ended, well or not.
        num_errors: of those, ended by something else than their number of tokens.
        num_tokens: of output.
        duration_s: from the first request to the last end.
        first_token: from a request's arrival to its first token. With a rate the arrival is when
            it was due, also if it was sent late.
        inter_token: between two outputs of a request; one may have several tokens.
        whole: from a request's arrival to its end.
        engine_cpu_s: processor time of the engine process and of those that it started, all
            threads.
        client_cpu_share: processor time of the load itself, in cores: near 1 it is the limit.
        steps: of the engine, if it tells.
    """

    workload: str
    concurrency: int | None
    rate: float | None
    num_requests: int
    num_errors: int
    num_tokens: int
    duration_s: float
    first_token: Distribution
    inter_token: Distribution
    whole: Distribution
    engine_cpu_s: float
    client_cpu_share: float
    steps: StepStatistics | None = None

    @property
    def tokens_per_s(self) -> float:
        """Of all requests together."""
        return self.num_tokens / self.duration_s

    @property
    def requests_per_s(self) -> float:
        """Ends per second."""
        return self.num_requests / self.duration_s

    @property
    def engine_cpu_us_per_token(self) -> float:
        """Processor time of the engine for one token, in microseconds."""
        return 1e6 * self.engine_cpu_s / max(1, self.num_tokens)


class SeenOutput(msgspec.Struct, array_like=True, gc=False):
    """The part of ``EngineCoreOutput`` that a load looks at; what follows is skipped unread."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: Any = None
    new_prompt_logprobs_tensors: Any = None
    pooling_output: Any = None
    finish_reason: int | None = None


class Recorder:
    """Takes in what comes back of a load while it runs, as cheaply as may be.

    Args:
        request_ids: of all requests that will be sent, in this order.
    """

    def __init__(self, request_ids: Sequence[str]) -> None:
        self.num_ended = 0
        self.num_errors = 0
        self.num_tokens = 0
        self._index_of = {request_id: index for index, request_id in enumerate(request_ids)}
        self._arrived_s = [0.0] * len(request_ids)
        # When the newest output came, 0 before the first.
        self._latest_s = [0.0] * len(request_ids)
        self._first_token = array("d")
        self._inter_token = array("d")
        self._whole = array("d")

    @property
    def is_complete(self) -> bool:
        """Whether all have ended."""
        return self.num_ended == len(self._index_of)

    def note_arrival(self, index: int, now_s: float) -> None:
        """A request is due, or sent."""
        self._arrived_s[index] = now_s

    def take(self, outputs: Iterable[SeenOutput], now_s: float) -> int:
        """Counts the outputs of one message. Returns how many requests have ended by it."""
        index_of, latest_s, inter_token = self._index_of, self._latest_s, self._inter_token
        num_tokens = 0
        ended: list[SeenOutput] = []
        for output in outputs:
            new = output.new_token_ids
            if new:
                num_tokens += len(new)
                index = index_of[output.request_id]
                before_s = latest_s[index]
                latest_s[index] = now_s
                if before_s:
                    inter_token.append(now_s - before_s)
                else:
                    self._first_token.append(now_s - self._arrived_s[index])
            if output.finish_reason is not None:
                ended.append(output)
        self.num_tokens += num_tokens
        for output in ended:
            self.num_errors += output.finish_reason != FinishReason.LENGTH
            self._whole.append(now_s - self._arrived_s[index_of[output.request_id]])
        self.num_ended += len(ended)
        return len(ended)

    def figures(
        self,
        workload: Workload,
        *,
        duration_s: float,
        engine_cpu_s: float,
        client_cpu_s: float,
        steps: StepStatistics | None,
    ) -> LoadFigures:
        """All of it, added up."""
        return LoadFigures(
            workload=workload.name,
            concurrency=workload.concurrency if workload.rate is None else None,
            rate=workload.rate,
            num_requests=self.num_ended,
            num_errors=self.num_errors,
            num_tokens=self.num_tokens,
            duration_s=duration_s,
            first_token=distribution_of(self._first_token),
            inter_token=distribution_of(self._inter_token),
            whole=distribution_of(self._whole),
            engine_cpu_s=engine_cpu_s,
            client_cpu_share=client_cpu_s / duration_s,
            steps=steps,
        )


class Pair(msgspec.Struct, frozen=True):
    """A run of either engine, one right after the other."""

    first: LoadFigures
    second: LoadFigures

    @property
    def ratio(self) -> float:
        """Tokens per second of the first for one of the second; NaN if that gave none."""
        if self.second.num_tokens == 0:
            return math.nan
        return self.first.tokens_per_s / self.second.tokens_per_s


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """All pairs of one workload."""

    workload: str
    pairs: list[Pair]

    @property
    def ratios(self) -> list[float]:
        """Of each pair, in the order of the runs."""
        return [pair.ratio for pair in self.pairs]

    @property
    def median_ratio(self) -> float:
        """The middle one of the pairs' ratios, not the ratio of two medians; NaN without any."""
        known = [ratio for ratio in self.ratios if not math.isnan(ratio)]
        return statistics.median(known) if known else math.nan

    @property
    def num_errors(self) -> int:
        """Requests of both that ended badly."""
        return sum(pair.first.num_errors + pair.second.num_errors for pair in self.pairs)

    def median(self, figure: Callable[[LoadFigures], float]) -> tuple[float, float]:
        """The median of a figure, of the first engine and of the second."""
        return (
            statistics.median(figure(pair.first) for pair in self.pairs),
            statistics.median(figure(pair.second) for pair in self.pairs),
        )
