"""What a burst of requests that can only wait costs those that stream.

    python -m tests.benchmarks.burst                       # null executor, 5 bursts
    python -m tests.benchmarks.burst --executor torch --bursts 3

As many requests stream as may run at once. Then a second front end, a process of its own, sends
2,000 requests of 1,000 tokens as fast as it can; they wait, and are aborted at the end. Compared
are the times between two tokens of a stream, before the burst and from its first request until
the engine has taken in the last one.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

from tests.benchmarks.engines import START_TIMEOUT_S, null_command
from tests.benchmarks.figures import Report, percentile
from tests.process.engine_programs import engine_command, open_engine_under_test
from trio_engine.testing.requests import make_request
from trio_engine.testing.wire_front_end import WireFrontEnd
from trio_engine.transport.context import open_context
from trio_engine.transport.ipc import IpcDirectory
from trio_engine.transport.socket import SocketKind
from trio_engine.wire.codec import OutputsDecoder, RequestEncoder
from trio_engine.wire.handshake import engine_identity
from trio_engine.wire.messages import AbortRequest, UtilityCall

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trio_engine.wire.messages import Frames

MAX_RATIO = 3.0
NUM_STREAMS = 32
NUM_REQUESTS = 2000
NUM_PROMPT_TOKENS = 1000
VOCAB_SIZE = 1024
"""Small enough for any model: which tokens the prompts hold makes no difference."""

MAX_TOKENS = 8000
QUIET_S = 4.0
BURST_TIMEOUT_S = 300.0
"""More than any engine that still goes on needs to take it in, with a model too."""

STREAM_PROMPT = list(range(100, 132))
SECOND = 1
"""Index of the client that sends the burst."""


# The second front end: a process of its own


def burst_frames() -> list[Frames]:
    """The burst and, behind it, a call: its answer says that all of it was taken in."""
    dice, encoder = random.Random(0), RequestEncoder()
    frames = []
    for number in range(NUM_REQUESTS):
        prompt = dice.choices(range(VOCAB_SIZE), k=NUM_PROMPT_TOKENS)
        request = make_request(f"burst-{number}", prompt, client=SECOND, max_tokens=8)
        frames.append(encoder.encode(request))
    frames.append(encoder.encode(UtilityCall(SECOND, 1, "is_sleeping", [])))
    return frames


async def send_burst(input_address: str, output_address: str) -> None:
    """Sends the burst at a line on stdin, and aborts it at the next one."""
    burst, identity = burst_frames(), engine_identity(0)
    async with open_context() as context:
        inbound = context.socket(SocketKind.ROUTER, linger_s=1.0, send_hwm=0)
        outbound = context.socket(SocketKind.PULL)
        inbound.bind(input_address)
        outbound.bind(output_address)
        await inbound.receive()  # the engine's announcement: from now on it can be sent to
        await next_line("ready")
        for frames in burst:
            await inbound.send([identity, *frames])
        while OutputsDecoder().decode(await outbound.receive()).utility_output is None:
            pass
        await next_line("taken")
        abort = AbortRequest([f"burst-{number}" for number in range(NUM_REQUESTS)])
        await inbound.send([identity, *RequestEncoder().encode(abort)])


async def next_line(word: str) -> None:
    """Tells the other process where this one is, and waits for its word."""
    print(word, flush=True)
    await trio.to_thread.run_sync(sys.stdin.readline)


# The front end whose requests stream


class Streams:
    """Requests without end; when each had its last token, and the times between two."""

    def __init__(self, front_end: WireFrontEnd) -> None:
        self._front_end = front_end
        self._decoder = OutputsDecoder()
        self._last: dict[str, float] = {}
        self._gaps: list[float] = []

    async def start(self) -> None:
        """Begins them, and waits until all have had a token."""
        for number in range(NUM_STREAMS):
            await self._front_end.add(
                f"stream-{number}", STREAM_PROMPT, max_tokens=MAX_TOKENS, ignore_eos=True
            )
        while len(self._last) < NUM_STREAMS:
            await self._read_once()
        self._gaps.clear()  # those of the first ones hold the prefill of the others

    async def read(self) -> None:
        """Reads for ever."""
        while True:
            await self._read_once()

    async def wait_gaps(self, count: int) -> None:
        """Waits until so many are there to be taken."""
        while len(self._gaps) < count:  # noqa: ASYNC110  # the one who reads tells nobody
            await trio.sleep(0.01)

    def take_gaps(self) -> list[float]:
        """In seconds, of all streams, since the last call."""
        gaps, self._gaps = self._gaps, []
        return gaps

    async def _read_once(self) -> None:
        frames = await self._front_end.receive_frames()
        now = time.perf_counter()
        for output in self._decoder.decode(frames).outputs:
            before = self._last.get(output.request_id)
            if before is not None:
                self._gaps.append(now - before)
            self._last[output.request_id] = now


async def wait_word(process: trio.Process, word: str) -> None:
    assert process.stdout is not None
    heard = b""
    while not heard.endswith(b"\n"):
        data = await process.stdout.receive_some()
        assert data, "the second front end has ended"
        heard += data
    assert heard.decode().strip() == word, heard


async def tell(process: trio.Process) -> None:
    assert process.stdin is not None
    await process.stdin.send_all(b"\n")


@asynccontextmanager
async def open_burst(directory: IpcDirectory) -> AsyncIterator[tuple[trio.Process, list[str]]]:
    """The process that sends it, and the addresses of its input and its output."""
    addresses = [directory.address("in"), directory.address("out")]
    command = [sys.executable, "-m", "tests.benchmarks.burst", "--send", *addresses]
    process = await trio.lowlevel.open_process(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        yield process, addresses
    finally:
        process.kill()
        with trio.CancelScope(shield=True):  # a killed process is gone in a moment
            await process.wait()


async def measure(command: list[str]) -> tuple[float, float]:
    """99th percentiles of the times between two tokens, before and in the burst, in ms."""
    with IpcDirectory() as directory:
        async with WireFrontEnd() as front_end, open_burst(directory) as (second, addresses):
            front_end.addresses.inputs.append(addresses[0])
            front_end.addresses.outputs.append(addresses[1])
            address = f"--handshake-address={front_end.handshake_address}"
            async with open_engine_under_test([*command, address]), trio.open_nursery() as tasks:
                with trio.fail_after(START_TIMEOUT_S):
                    await front_end.start_up()
                    await wait_word(second, "ready")
                streams = Streams(front_end)
                await streams.start()
                tasks.start_soon(streams.read)
                await trio.sleep(QUIET_S)
                quiet = streams.take_gaps()
                with trio.fail_after(BURST_TIMEOUT_S):
                    await tell(second)
                    await wait_word(second, "taken")
                    # With a model one step may outlast the burst.
                    await streams.wait_gaps(NUM_STREAMS)
                burst = streams.take_gaps()
                await tell(second)
                tasks.cancel_scope.cancel()
    return 1000 * percentile(quiet, 0.99), 1000 * percentile(burst, 0.99)


async def run(command: list[str], num_bursts: int, report: Report) -> None:
    ratios = []
    for _ in range(num_bursts):
        quiet_ms, burst_ms = await measure(command)
        report.note(f"gap between two tokens, p99: quiet {quiet_ms:.2f} ms, burst {burst_ms:.2f}")
        ratios.append(burst_ms / quiet_ms)
    report.add("p99 in the burst / quiet", statistics.median(ratios), "", below=MAX_RATIO)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--executor", choices=["null", "torch"], default="null")
    parser.add_argument("--bursts", type=int, default=5)
    parser.add_argument("--send", nargs=2, metavar="ADDRESS", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.send is not None:
        trio.run(send_burst, *options.send)
        return 0
    limits = (f"--max-num-seqs={NUM_STREAMS}", "--max-model-len=8192")
    if options.executor == "null":
        command = null_command("--null-step-ms=2", *limits)
    else:
        command = engine_command("--executor=torch", *limits)
    report = Report(f"{NUM_STREAMS} streams beside a burst of {NUM_REQUESTS}")
    trio.run(run, command, options.bursts, report)
    return report.exit_status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
