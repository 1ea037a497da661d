"""Puts a load on an engine over the bare wire.

A client for people would cost more than the engine that is measured: text, mailboxes, an object for
each item. So requests are encoded before the clock starts, of an answer only id, tokens and
end are decoded, and what came is written into arrays. Trio's wake-ups are shared: each takes
all that has arrived.
"""

from __future__ import annotations

import gc
import math
import time
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec
import trio

from trio_engine.bench.figures import LoadFigures, Recorder, SeenOutput
from trio_engine.bench.workload import make_asks
from trio_engine.client.service_tasks import open_service_tasks
from trio_engine.requests import EngineCoreRequest
from trio_engine.sampling_params import RequestOutputKind, SamplingParams
from trio_engine.wire.codec import RequestEncoder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trio_engine.bench.engine import BenchEngine
    from trio_engine.bench.workload import Ask, Workload
    from trio_engine.wire.messages import Frames

    Progress = Callable[[Recorder], object]

MAX_MESSAGES_PER_WAKE_UP = 64
"""Of one message each step at most 64 steps' worth: then it is the next request's turn."""


class _Outputs(msgspec.Struct, array_like=True, gc=False):
    """The part of ``EngineCoreOutputs`` that a load looks at."""

    engine_index: int
    outputs: list[SeenOutput]


class _Load:
    """One run of a workload."""

    def __init__(
        self, engine: BenchEngine, workload: Workload, asks: list[Ask], on_progress: Progress
    ) -> None:
        self._engine = engine
        self._workload = workload
        self._on_progress = on_progress
        self._asks = asks
        self._decoder = msgspec.msgpack.Decoder(_Outputs)
        # An id is used once in an engine's life, and a short one is read faster.
        run = engine.next_run()
        ids = [f"{run}-{index}" for index in range(len(asks))]
        self.recorder = Recorder(ids)
        self._unsent: deque[Frames] = deque(_encode(asks, ids))
        self._num_sent = 0
        # Around the wait for answers; its deadline is how long the engine may still be silent.
        self._waiting = trio.CancelScope()

    async def run(self) -> None:
        """Sends all and reads until all have ended, or the engine has left or hangs."""
        async with open_service_tasks() as tasks:
            with self._waiting:
                tasks.start_soon(self._engine.cancel_when_gone, self._waiting)
                if self._workload.rate is None:
                    for _ in range(min(self._workload.concurrency, len(self._asks))):
                        self._send_next(time.perf_counter())
                else:
                    tasks.start_soon(self._send_on_time)
                await self._read_all()
        if not self.recorder.is_complete:
            raise self._engine.death()

    async def _send_on_time(self) -> None:
        start_s = time.perf_counter()
        for ask in self._asks:
            due_s = start_s + ask.arrival_s
            await trio.sleep(max(0.0, due_s - time.perf_counter()))
            self._send_next(due_s)

    async def _read_all(self) -> None:
        recorder, is_closed = self.recorder, self._workload.rate is None
        while not recorder.is_complete:
            num_answers = recorder.num_tokens + recorder.num_ended
            for frames in await self._engine.receive_many(MAX_MESSAGES_PER_WAKE_UP):
                outputs = self._decoder.decode(frames[0]).outputs
                num_ended = recorder.take(outputs, time.perf_counter())
                if is_closed:
                    for _ in range(min(num_ended, len(self._unsent))):
                        self._send_next(time.perf_counter())
            # By answers, not by messages: an engine that hangs may still send its statistics.
            if recorder.num_tokens + recorder.num_ended > num_answers:
                self._restart_stall_timeout()
            self._on_progress(recorder)

    def _send_next(self, arrival_s: float) -> None:
        self.recorder.note_arrival(self._num_sent, arrival_s)
        self._engine.send(self._unsent.popleft())
        self._num_sent += 1
        if self._num_sent - self.recorder.num_ended == 1:  # before it had nothing to do
            self._restart_stall_timeout()

    def _restart_stall_timeout(self) -> None:
        has_work = self._num_sent > self.recorder.num_ended
        limit_s = self._engine.stall_timeout_s if has_work else math.inf
        self._waiting.deadline = trio.current_time() + limit_s


def _encode(asks: list[Ask], ids: list[str]) -> Iterator[Frames]:
    encoder = RequestEncoder()
    for ask, request_id in zip(asks, ids, strict=True):
        params = SamplingParams(
            temperature=0.0,
            max_tokens=ask.output_tokens,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )
        yield encoder.encode(
            EngineCoreRequest(
                request_id, ask.prompt_token_ids, None, params, None, time.time(), None, None, None
            )
        )


@contextmanager
def _collector_off() -> Iterator[None]:
    # It would walk the arrays' owners and all requests again and again, in the engine's time.
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


async def run_load(
    engine: BenchEngine, workload: Workload, on_progress: Progress = lambda _: None
) -> LoadFigures:
    """Runs a workload on an engine that has nothing else to do.

    Args:
        engine: which is not shared meanwhile.
        workload: what to send.
        on_progress: called now and then with what has come.

    Raises:
        EngineDeadError: the engine ended, or gave no answer for its ``stall_timeout_s``.
        ConfigError: the engine does not serve requests of this length.

    Cancellation: the engine goes on with what it has; end it then.
    """
    load = _Load(engine, workload, make_asks(workload, engine.max_model_len), on_progress)
    steps_before = await engine.step_statistics()
    engine_cpu_s, client_cpu_s = engine.cpu_s(), time.process_time()
    start_s = time.perf_counter()
    with _collector_off():
        await load.run()
        duration_s = time.perf_counter() - start_s
    engine_cpu_s = engine.cpu_s() - engine_cpu_s
    client_cpu_s = time.process_time() - client_cpu_s
    steps = await engine.step_statistics()
    if steps is not None and steps_before is not None:
        steps = steps.since(steps_before)
    return load.recorder.figures(
        workload,
        duration_s=duration_s,
        engine_cpu_s=engine_cpu_s,
        client_cpu_s=client_cpu_s,
        steps=steps,
    )
