"""No message harms the streams beside it: same tokens, the right answer, and a later request works.

Two clients stream, each a request of its own under the same id, and a step of both is running
while the message comes in.
"""

from __future__ import annotations

import logging
import math
import threading
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import trio

from tests.tasks.bad_frames import BAD_FRAMES
from tests.tasks.bad_messages import (
    CALL_ID,
    CONFIG,
    LIVE_ID,
    VOCAB_SIZE,
    BadMessage,
    Reaction,
    Table,
)
from tests.tasks.bad_requests import BAD_REQUESTS, STRANGE_REQUESTS
from tests.tasks.engine_parts import TEST_TIMEOUT_S, check_nothing_held, open_engine_beside
from trio_engine.engine import guarded_compiler
from trio_engine.executor.kv_checking import KVCheckingExecutor
from trio_engine.outputs import FinishReason
from trio_engine.sampling_params import StructuredOutputsParams
from trio_engine.testing.core_driver import RequestLog
from trio_engine.testing.scripted_executor import Gate

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    from trio_engine.config import EngineConfig
    from trio_engine.core.plan import DeviceCommand, ExecutorProperties, StepPlan, StepResult
    from trio_engine.engine.engine_core_proc import EngineCoreProc
    from trio_engine.executor.base import Executor
    from trio_engine.testing.wire_front_end import WireFrontEnd

ALL_MESSAGES: Table = {**BAD_FRAMES, **BAD_REQUESTS, **STRANGE_REQUESTS}

PROMPTS = ([1, 2, 3], [4, 5])
"""Of each client's stream."""
NUM_CLIENTS = len(PROMPTS)
OPTIONS = {"temperature": 1.0, "seed": 42, "max_tokens": 8}

START_TIMEOUT_S = 120.0
"""The engine loads a model, and a process for trials imports; on a busy machine both take long."""

LOG_LINE_LIMIT = 1000
"""Characters. Whatever was sent, a line about it stays readable."""


class HeldExecutor:
    """Another executor, whose steps end when the gate lets them."""

    def __init__(self, inner: Executor, gate: Gate) -> None:
        self.launches_ahead = inner.launches_ahead
        self._inner = inner
        self._gate = gate

    def load(self) -> ExecutorProperties:
        return self._inner.load()

    def launch(self, plan: StepPlan) -> None:
        self._inner.launch(plan)

    def collect(self) -> StepResult:
        self._gate.pass_through()
        return self._inner.collect()

    def command(self, command: DeviceCommand) -> Any:
        return self._inner.command(command)

    def shutdown(self) -> None:
        self._inner.shutdown()


class Bench:
    """An engine with two clients, and what each one's stream gives if nobody disturbs it."""

    def __init__(self, front_end: WireFrontEnd, proc: EngineCoreProc, gate: Gate) -> None:
        self.front_end = front_end
        self.undisturbed: list[list[int]] = []
        self._sender = 0
        self._proc = proc
        self._gate = gate

    async def start_streams(self) -> None:
        """Starts both, and returns in the middle of a step that computes both."""
        self._gate.close()
        for client, prompt in enumerate(PROMPTS):
            await self.front_end.add(LIVE_ID, prompt, client=client, **OPTIONS)
            await self.front_end.call_utility("is_sleeping", client=client)  # so it has come in
        self._gate.let_pass(3)
        for client in range(NUM_CLIENTS):
            await self.front_end.wait_num_tokens(LIVE_ID, 1, client=client)
        await self._gate.wait_held()

    async def warm_up(self) -> None:
        """Runs the streams alone, and starts the process that tries grammars."""
        await self.start_streams()
        self.undisturbed = await self.finish_streams()
        grammar = StructuredOutputsParams(regex="a")
        await self.front_end.add("warm-up", PROMPTS[0], structured_outputs=grammar)
        await self.front_end.finish("warm-up")

    async def finish_streams(self) -> list[list[int]]:
        self._gate.open()
        logs = [
            await self.front_end.finish(LIVE_ID, client=client) for client in range(NUM_CLIENTS)
        ]
        assert all(log.finish_reason is FinishReason.LENGTH for log in logs)
        return [log.token_ids for log in logs]

    async def check(self, message: BadMessage, log: pytest.LogCaptureFixture) -> None:
        """Sends it, by the other client than the last one, and checks all that is promised."""
        self._sender = (self._sender + 1) % NUM_CLIENTS
        with trio.fail_after(TEST_TIMEOUT_S):
            try:
                await self._check(message, self._sender, log)
            except Exception:
                await self._clear()  # or the next row would fail with this one
                raise

    async def _check(self, message: BadMessage, sender: int, log: pytest.LogCaptureFixture) -> None:
        await self.start_streams()
        log.clear()
        heard = RequestLog()
        if message.is_answered:
            heard = self.front_end.listen(message.request_id, client=sender)
        await self.front_end.send_frames(message.frames(sender), sender)
        await self.front_end.call_utility("is_sleeping", client=sender)
        check_told_at_once(message, heard)
        assert await self.finish_streams() == self.undisturbed
        await self._check_told_later(message, sender, heard)
        check_logged(message, [record.getMessage() for record in log.records])
        await self.front_end.add("later", PROMPTS[sender], client=sender, **OPTIONS)
        later = await self.front_end.finish("later", client=sender)
        assert later.token_ids == self.undisturbed[sender]
        check_nothing_held(self._proc)

    async def _clear(self) -> None:
        self._gate.open()
        for client in range(NUM_CLIENTS):
            ids = [request_id for index, request_id in self.front_end.logs if index == client]
            await self.front_end.abort(*ids, client=client)
            await self.front_end.call_utility("is_sleeping", client=client)

    async def _check_told_later(self, message: BadMessage, sender: int, heard: RequestLog) -> None:
        if message.reaction is Reaction.FAILED:
            answer = await self.front_end.wait_answer(CALL_ID, client=sender)
            assert message.reason in (answer.failure_message or "")
            return
        if not message.is_answered:
            return
        await self.front_end.finish(message.request_id, client=sender)
        if message.reaction is Reaction.SERVED:
            assert heard.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
            assert heard.token_ids
        elif message.reaction is not Reaction.ANSWERED:
            check_refused(message, heard)


def check_told_at_once(message: BadMessage, heard: RequestLog) -> None:
    """A refusal does not wait for the step that runs."""
    if message.reaction is Reaction.REFUSED:
        check_refused(message, heard)
    elif message.reaction is not Reaction.ANSWERED:
        assert not heard.token_ids


def check_refused(message: BadMessage, heard: RequestLog) -> None:
    (output,) = heard.outputs
    assert (output.finish_reason, output.new_token_ids) == (FinishReason.ERROR, [])
    assert message.reason in str(output.stop_reason)
    assert len(str(output.stop_reason)) < LOG_LINE_LIMIT


def check_logged(message: BadMessage, lines: list[str]) -> None:
    if message.reaction in (Reaction.DROPPED, Reaction.REFUSED, Reaction.REFUSED_LATER):
        assert len(lines) == 1
        assert message.reason in lines[0]
    elif message.reaction in (Reaction.SERVED, Reaction.IGNORED):
        assert not lines
    for line in lines:
        assert len(line) < LOG_LINE_LIMIT
        assert line.isprintable()


@asynccontextmanager
async def open_bench(executor: Executor, config: EngineConfig = CONFIG) -> AsyncIterator[Bench]:
    gate = Gate()
    held = HeldExecutor(executor, gate)
    async with open_engine_beside(
        held, config=config, num_clients=NUM_CLIENTS, within_s=math.inf
    ) as (front_end, proc):
        bench = Bench(front_end, proc, gate)
        try:
            await bench.warm_up()
            yield bench
        finally:
            gate.open()


def make_kv_checking(_folder: Path) -> tuple[Executor, EngineConfig]:
    return KVCheckingExecutor(CONFIG, vocab_size=VOCAB_SIZE), CONFIG


def make_torch(folder: Path) -> tuple[Executor, EngineConfig]:
    pytest.importorskip("torch")
    from tests.model.tiny_models import make_hf_folder
    from trio_engine.executor.torch_executor import TorchExecutor

    make_hf_folder("llama", folder, vocab_size=VOCAB_SIZE)
    config = msgspec.structs.replace(CONFIG, executor="torch", model=str(folder), device="cpu")
    return TorchExecutor(config), config


@pytest.fixture(scope="module")
def trial_is_kept() -> Iterator[None]:
    """However slow the machine is: a row that started another process would leave it behind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guarded_compiler, "KEEP_TRIAL_S", math.inf)
        yield


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(make_kv_checking, id="kv-checking"),
        pytest.param(make_torch, id="torch", marks=pytest.mark.slow),
    ],
)
def check(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    trial_is_kept: None,
) -> Iterator[Callable[[BadMessage, pytest.LogCaptureFixture], None]]:
    """``Bench.check`` of one engine for all rows, which runs in a thread of its own."""
    executor, config = request.param(tmp_path_factory.mktemp("model"))
    opened = Future[tuple[Bench, trio.lowlevel.TrioToken, trio.Event]]()

    async def main() -> None:
        async with open_bench(executor, config) as bench:
            ended = trio.Event()
            opened.set_result((bench, trio.lowlevel.current_trio_token(), ended))
            await ended.wait()

    thread = threading.Thread(target=trio.run, args=(main,))
    thread.start()
    bench, token, ended = opened.result(START_TIMEOUT_S)
    yield lambda *args: trio.from_thread.run(bench.check, *args, trio_token=token)
    with suppress(trio.RunFinishedError):  # it died, and the row that killed it has failed
        token.run_sync_soon(ended.set)
    thread.join()


@pytest.mark.known_fault(kind="token-out-of-range")
@pytest.mark.known_fault(kind="undecodable-frame")
@pytest.mark.parametrize("message", ALL_MESSAGES.values(), ids=ALL_MESSAGES)
def test_it_harms_no_stream_and_gets_what_it_deserves(
    check: Callable[[BadMessage, pytest.LogCaptureFixture], None],
    message: BadMessage,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "trio_engine")
    check(message, caplog)
