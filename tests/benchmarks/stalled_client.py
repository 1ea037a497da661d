"""What a client that does not read costs the engine and its other client.

    python -m tests.benchmarks.stalled_client                        # everything, 5 pairs
    python -m tests.benchmarks.stalled_client --load logprobs --pairs 1 --requests 16 --tokens 50

Two clients stream as many requests each. One never reads: its socket takes one message and has
small buffers. By default it is reached by a local socket, where the system holds some 200 KB for
it; with ``--tcp`` the engine's side of the connection takes up to 2 MB. The other one's times
between two tokens of a request are compared with those of a run in which both read; runs of
either kind take turns. When the other client is done, the stalled one reads what there is for it,
and each of its requests must have had one end:

- ``tokens``: what is unsent stays under the engine's limit, so nothing is lost.
- ``logprobs``: 20 at each token. The engine's limit is met, and all its requests end with ERROR.
- ``adds``: it also sends requests all the time, as fast as it can, until some time after the limit
  was met. Those that wait are bounded by ``--max-waiting-requests``; every refusal is one more
  output that it does not read.

The engine's memory is that at its peak, less that before the first request.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

import trio

from tests.benchmarks.engines import null_command, open_wire_engine
from tests.benchmarks.figures import MB, Report, peak_rss_bytes, percentile, rss_bytes
from trio_engine.config import EngineConfig
from trio_engine.executor.null import null_token
from trio_engine.outputs import FinishReason
from trio_engine.testing.core_driver import RequestLog
from trio_engine.testing.requests import make_request
from trio_engine.transport.context import open_context
from trio_engine.transport.ipc import IpcDirectory
from trio_engine.transport.socket import SocketKind
from trio_engine.wire.codec import OutputsDecoder, RequestEncoder
from trio_engine.wire.messages import UtilityCall

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trio_engine.testing.wire_front_end import WireFrontEnd
    from trio_engine.transport.socket import ZmqSocket

STALLED, OTHER = 0, 1
MAX_RATIO = 1.5
MAX_MB = 50.0
PROMPT = list(range(100, 132))
SMALL_BUFFER_BYTES = 4096
NUM_LOGPROBS = 20
MAX_WAITING = 1024
OVERFLOW_S = 120.0
"""The stalled client's limit is met at 16 MiB, after some 400,000 tokens and refusals."""

BEYOND_S = 2.0
"""The stalled client goes on after its limit was met, long enough to show where that ends up."""

READ_REST_S = 300.0
"""The stalled client may have asked for a great deal before the engine stopped to read it."""


class Load(NamedTuple):
    """What both clients ask for. ``adds``: the stalled one goes on asking.

    ``limit_bytes`` is the engine's for what is unsent to one client.
    """

    name: str
    num_requests: int
    num_tokens: int
    step_ms: float
    limit_bytes: int
    tcp: bool = False
    logprobs: int | None = None
    adds: bool = False

    @property
    def command(self) -> list[str]:
        return null_command(
            f"--null-step-ms={self.step_ms:g}",
            f"--max-num-seqs={2 * self.num_requests}",
            f"--outbox-limit-bytes={self.limit_bytes}",
            *([f"--max-waiting-requests={MAX_WAITING}"] if self.adds else []),
        )


class Run(NamedTuple):
    """One engine's figures: of the other client, of its memory, and what the stalled one got.

    ``num_messages``: in how many it came, fewer than steps if outputs had to wait for it.
    """

    p50_ms: float
    p99_ms: float
    growth_mb: float
    ends: Counter[str]
    num_messages: int


class StalledClient:
    """A client's sockets and the lives of its requests, of which it may read nothing for long."""

    def __init__(self, front_end: WireFrontEnd, outputs: ZmqSocket) -> None:
        self.logs: dict[str, RequestLog] = {}
        self.num_messages = 0
        self._front_end = front_end
        self._outputs = outputs
        self._encoder = RequestEncoder()
        self._decoder = OutputsDecoder()

    async def add(self, load: Load, number: int) -> None:
        request_id = f"stalled-{number}"
        request = make_request(
            request_id,
            PROMPT,
            client=STALLED,
            max_tokens=load.num_tokens,
            logprobs=load.logprobs,
            ignore_eos=True,
        )
        await self._front_end.send_frames(self._encoder.encode(request), STALLED)
        self.logs[request_id] = RequestLog()  # a send that is cancelled has sent nothing

    async def wait_taken_in(self) -> None:
        """Returns when the engine has all that was sent: a call goes by the same road."""
        await self._front_end.send_frames(
            self._encoder.encode(UtilityCall(STALLED, 1, "is_sleeping", [])), STALLED
        )
        while self._decoder.decode(await self._outputs.receive()).utility_output is None:
            pass

    async def add_for_ever(self, load: Load) -> None:
        number = load.num_requests
        while True:
            await self.add(load, number)
            number += 1

    async def read_for_ever(self) -> None:
        """As a client does that keeps up; it looks at nothing."""
        while True:
            await self._outputs.receive()

    async def read_rest(self) -> None:
        """Reads until all its requests have ended."""
        num_open = len(self.logs)
        while num_open:
            frames = await self._outputs.receive()
            self.num_messages += 1
            for output in self._decoder.decode(frames).outputs:
                log = self.logs[output.request_id]
                assert log.finish_reason is None, f"{output.request_id} goes on after its end"
                log.token_ids += output.new_token_ids
                log.finish_reason = output.finish_reason
                num_open -= log.finish_reason is not None

    def check_ends(self, load: Load) -> Counter[str]:
        """How many of its requests ended in which way; their tokens are checked."""
        for request_id, log in self.logs.items():
            count = len(log.token_ids)
            assert log.token_ids == [null_token(PROMPT, n) for n in range(count)], request_id
            is_whole = log.finish_reason is FinishReason.LENGTH and count == load.num_tokens
            assert is_whole or log.finish_reason is FinishReason.ERROR, f"{request_id}: {log}"
        return Counter(str(log.finish_reason) for log in self.logs.values())


async def add_other(front_end: WireFrontEnd, load: Load, number: int) -> None:
    await front_end.add(
        f"other-{number}",
        PROMPT,
        client=OTHER,
        max_tokens=load.num_tokens,
        logprobs=load.logprobs,
        ignore_eos=True,
    )


async def add_all(stalled: StalledClient, front_end: WireFrontEnd, load: Load) -> None:
    """Both clients' requests, of which none begins before the engine is resumed.

    Else the first ones would be done before the last ones come where this process is slow.
    """
    await front_end.call_utility("pause_scheduler", "keep", client=OTHER)
    for number in range(load.num_requests):
        await stalled.add(load, number)
        await add_other(front_end, load, number)
    await stalled.wait_taken_in()


async def read_gaps(front_end: WireFrontEnd, load: Load) -> list[float]:
    """Reads the other client's outputs to their ends; seconds between two items of a request."""
    decoder = OutputsDecoder()
    last: dict[str, float] = {}
    gaps: list[float] = []
    num_open = load.num_requests
    while num_open:
        frames = await front_end.receive_frames(OTHER)
        now = time.perf_counter()
        for output in decoder.decode(frames).outputs:
            before = last.get(output.request_id)
            if before is not None:
                gaps.append(now - before)
            last[output.request_id] = now
            num_open -= output.finish_reason is not None
    return gaps


@asynccontextmanager
async def open_stalled_outputs(tcp: bool) -> AsyncIterator[tuple[ZmqSocket, str]]:
    """Where the engine is to send the stalled client's outputs, and the address."""
    async with open_context() as context:
        with IpcDirectory() as directory:
            outputs = context.socket(
                SocketKind.PULL, receive_hwm=1, buffer_bytes=SMALL_BUFFER_BYTES
            )
            yield outputs, outputs.bind("tcp://127.0.0.1:*" if tcp else directory.address("out"))


async def measure(load: Load, *, stalls: bool) -> Run:
    """One engine under the load, with a client that stalls or one that reads."""
    async with (
        open_stalled_outputs(load.tcp) as (outputs, address),
        open_wire_engine(load.command, outputs=(address, None)) as (front_end, engine),
    ):
        stalled = StalledClient(front_end, outputs)
        pid = engine.process.pid
        rss_before = rss_bytes(pid)
        async with trio.open_nursery() as tasks:
            await add_all(stalled, front_end, load)
            if not stalls:
                tasks.start_soon(stalled.read_for_ever)
            await front_end.call_utility("resume_scheduler", client=OTHER)
            if load.adds:
                tasks.start_soon(stalled.add_for_ever, load)
            gaps = await read_gaps(front_end, load)
            if load.adds:
                with trio.fail_after(OVERFLOW_S):
                    await engine.wait_stderr("client_overflow")
                await trio.sleep(BEYOND_S)
            growth_mb = (peak_rss_bytes(pid) - rss_before) / MB
            tasks.cancel_scope.cancel()
        ends = Counter[str]()
        if stalls:
            with trio.fail_after(READ_REST_S):
                await stalled.read_rest()
            ends = stalled.check_ends(load)
    p50_ms, p99_ms = (1000 * percentile(gaps, fraction) for fraction in (0.5, 0.99))
    return Run(p50_ms, p99_ms, growth_mb, ends, stalled.num_messages)


async def compare(load: Load, num_pairs: int, report: Report) -> None:
    """Reports pairs of runs, first with the client reading and then with it stalled."""
    pairs = []
    for _ in range(num_pairs):
        reading = await measure(load, stalls=False)
        pairs.append((reading, await measure(load, stalls=True)))
        report.note(describe(load.name, *pairs[-1]))
    ratio = statistics.median(stalled.p99_ms / reading.p99_ms for reading, stalled in pairs)
    report.add(f"{load.name}: p99 stalled / reading", ratio, "", below=MAX_RATIO)
    growth_mb = max(stalled.growth_mb for _, stalled in pairs)
    report.add(f"{load.name}: growth of the engine", growth_mb, "MB", below=MAX_MB)


def describe(name: str, reading: Run, stalled: Run) -> str:
    return (
        f"{name}: other client's gap p50/p99"
        f" {reading.p50_ms:.2f}/{reading.p99_ms:.2f} ms beside a reader,"
        f" {stalled.p50_ms:.2f}/{stalled.p99_ms:.2f} ms beside the stalled one;"
        f" engine +{reading.growth_mb:.1f} and +{stalled.growth_mb:.1f} MB;"
        f" ends {dict(stalled.ends)} in {stalled.num_messages} messages"
    )


async def flood(load: Load, num_runs: int, report: Report) -> None:
    """Reports runs in which the stalled client goes on asking."""
    runs = []
    for _ in range(num_runs):
        run = await measure(load, stalls=True)
        runs.append(run)
        report.note(
            f"{load.name}: other client's gap p50/p99 {run.p50_ms:.2f}/{run.p99_ms:.2f} ms,"
            f" engine +{run.growth_mb:.1f} MB, ends {dict(run.ends)}"
        )
    growth_mb = max(run.growth_mb for run in runs)
    report.add(f"{load.name}: growth of the engine", growth_mb, "MB", below=MAX_MB)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--load", choices=["tokens", "logprobs", "adds", "all"], default="all")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--requests", type=int, default=128, help="of each client")
    parser.add_argument("--tokens", type=int, default=1000, help="of each request")
    parser.add_argument("--step-ms", type=float, default=2.0)
    parser.add_argument(
        "--limit-bytes", type=int, default=EngineConfig().outbox_limit_bytes, help="of an outbox"
    )
    parser.add_argument("--tcp", action="store_true", help="between engine and stalled client")
    options = parser.parse_args(arguments)
    shape = (options.requests, options.tokens, options.step_ms, options.limit_bytes, options.tcp)
    report = Report(
        f"a stalled client: 2 x {options.requests} requests of {options.tokens} tokens,"
        f" steps of {options.step_ms:g} ms"
    )
    if options.load in ("tokens", "all"):
        trio.run(compare, Load("tokens", *shape), options.pairs, report)
    if options.load in ("logprobs", "all"):
        trio.run(compare, Load("logprobs", *shape, logprobs=NUM_LOGPROBS), options.pairs, report)
    if options.load in ("adds", "all"):
        trio.run(flood, Load("adds", *shape, adds=True), options.pairs, report)
    return report.exit_status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
