"""Between sockets and the step loop: nothing is lost, nothing is decided."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.tasks.engine_parts import TEST_TIMEOUT_S
from tests.tasks.slow_network import SlowNetwork
from trio_engine.core.outbox import Outbox
from trio_engine.core.request import Request
from trio_engine.core.step_phases import DeviceClock, StepPhases
from trio_engine.engine import pumps
from trio_engine.engine.doorbell import Doorbell
from trio_engine.engine.inbox import (
    LAST_READING_S,
    MAX_LISTS,
    MAX_REST_S,
    REST_PER_DECODING,
    Inbox,
)
from trio_engine.engine.pumps import (
    MAX_BYTES_PER_SLICE,
    MAX_LAST_MESSAGES,
    MAX_MESSAGES_PER_SLICE,
    OutputWriter,
    next_limit,
    read_requests,
)
from trio_engine.outputs import FinishReason, UtilityOutput, UtilityResult
from trio_engine.requests import EngineCoreRequest
from trio_engine.sampling_params import SamplingParams
from trio_engine.testing.memory_transport import MemoryNetwork
from trio_engine.testing.requests import make_request
from trio_engine.transport.context import ZmqContext, open_context
from trio_engine.transport.readiness import Direction
from trio_engine.transport.socket import SocketKind
from trio_engine.wire.codec import OutputsDecoder, RequestEncoder, UndecodableRequest
from trio_engine.wire.messages import ENGINE_CORE_DEAD, AbortRequest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from trio.testing import MockClock

    from trio_engine.outputs import EngineCoreOutputs
    from trio_engine.testing.memory_transport import MemorySocket
    from trio_engine.transport.socket import ZmqSocket
    from trio_engine.wire.messages import EngineCoreMessage

PEER = b"\x00\x00"


@pytest.fixture
async def context() -> AsyncIterator[ZmqContext]:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_context() as made:
            yield made


@pytest.fixture
async def inputs(context: ZmqContext, tmp_path: Path) -> tuple[ZmqSocket, ZmqSocket]:
    """A front end's ROUTER and the engine's DEALER, which have met."""
    router = context.socket(SocketKind.ROUTER)
    dealer = context.socket(SocketKind.DEALER, identity=PEER, receive_hwm=0)
    dealer.connect(router.bind(f"ipc://{tmp_path}/in"))
    await dealer.send([b"hello"])
    await router.receive()
    return router, dealer


@pytest.fixture
async def outputs(context: ZmqContext, tmp_path: Path) -> tuple[ZmqSocket, ZmqSocket]:
    """The engine's PUSH and a front end's PULL."""
    pull = context.socket(SocketKind.PULL)
    push = context.socket(SocketKind.PUSH)
    push.connect(pull.bind(f"ipc://{tmp_path}/out"))
    return push, pull


class CountingInbox(Inbox):
    """Tells when it has taken in so many messages."""

    def __init__(self) -> None:
        self.doorbell = Doorbell()
        super().__init__(self.doorbell)
        self.ids: list[str] = []

    def empty(self) -> None:
        for arrival in self.take():
            message = arrival.message
            assert arrival.client_index == 3
            if isinstance(message, EngineCoreRequest):
                self.ids.append(message.request_id)
            else:
                assert isinstance(message, AbortRequest)
                self.ids += message.request_ids

    async def wait_ids(self, count: int) -> None:
        while len(self.ids) < count:
            await self.doorbell.wait()
            self.empty()


def never() -> bool:
    """No request must wait."""
    return False


def always() -> bool:
    """All can only wait."""
    return True


async def send_aborts(router: ZmqSocket, *request_ids: str) -> None:
    encoder = RequestEncoder()
    for request_id in request_ids:
        await router.send([PEER, *encoder.encode(AbortRequest([request_id]))])


# Reading


@pytest.mark.parametrize(
    "ids",
    [
        [str(i) for i in range(10 * MAX_MESSAGES_PER_SLICE)],
        [f"{i}-{'x' * (i * MAX_BYTES_PER_SLICE // 10)}" for i in range(40)],
    ],
    ids=["many", "large"],
)
async def test_a_burst_is_read_whole_and_in_order(
    inputs: tuple[ZmqSocket, ZmqSocket], ids: list[str]
) -> None:
    router, dealer = inputs
    inbox = CountingInbox()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(read_requests, dealer, Outbox(3, 0), Doorbell(), inbox, never)
        await send_aborts(router, *ids)
        await inbox.wait_ids(len(ids))
        nursery.cancel_scope.cancel()
    assert inbox.ids == ids


@pytest.mark.parametrize(
    ("sizes", "limit"),
    [
        ([100, 20], MAX_MESSAGES_PER_SLICE),
        ([0], MAX_MESSAGES_PER_SLICE),
        ([10, MAX_BYTES_PER_SLICE // 3], 3),
        ([MAX_BYTES_PER_SLICE * 5, 10], 1),
    ],
)
def test_large_messages_are_read_in_smaller_slices(sizes: list[int], limit: int) -> None:
    assert next_limit([[b"", bytes(size)] for size in sizes]) == limit


async def test_a_reader_waits_for_the_loop_and_leaves_the_rest_to_zeromq(
    inputs: tuple[ZmqSocket, ZmqSocket], context: ZmqContext
) -> None:
    router, dealer = inputs
    inbox = CountingInbox()
    ids = [str(i) for i in range(2 * MAX_LISTS * MAX_MESSAGES_PER_SLICE)]
    await send_aborts(router, *ids)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(read_requests, dealer, Outbox(3, 0), Doorbell(), inbox, never)
        while dealer.statistics().messages_received < MAX_LISTS:
            await trio.lowlevel.checkpoint()
        await wait_all_tasks_blocked(0.05)
        lists = MAX_LISTS + 1  # one more in the reader's hands
        assert dealer.statistics().messages_received <= lists * MAX_MESSAGES_PER_SLICE
        await inbox.wait_ids(len(ids))
        nursery.cancel_scope.cancel()
    assert inbox.ids == ids


async def test_cancelling_a_reader_loses_nothing_that_has_arrived(
    inputs: tuple[ZmqSocket, ZmqSocket],
) -> None:
    """Neither what it holds while the inbox is full, nor what is still in its socket."""
    router, dealer = inputs
    inbox = CountingInbox()
    ids = [str(i) for i in range(MAX_LISTS + 100)]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(read_requests, dealer, Outbox(3, 0), Doorbell(), inbox, never)
        for number, request_id in enumerate(ids, 1):
            await send_aborts(router, request_id)
            if number <= MAX_LISTS + 1:  # one by one, so that each is a list
                while dealer.statistics().messages_received < number:
                    await trio.lowlevel.checkpoint()
        await wait_all_tasks_blocked(0.05)
        assert dealer.statistics().messages_received == MAX_LISTS + 1
        nursery.cancel_scope.cancel()
    inbox.empty()
    assert len(inbox.ids) > MAX_LISTS
    while len(inbox.ids) < len(ids):  # ZeroMQ may not have handed over all of them by then
        _, body = await dealer.receive()
        inbox.ids += msgspec.msgpack.decode(body)
    assert inbox.ids == ids


def add_of(number: int) -> EngineCoreRequest:
    return make_request(str(number), [1, 2, 3], client=3)


def abort_of(number: int) -> AbortRequest:
    return AbortRequest([str(number)])


def socket_with(
    network: MemoryNetwork, count: int, message_of: Callable[[int], EngineCoreMessage] = add_of
) -> MemorySocket:
    """A socket at which so many messages wait."""
    socket, encoder = network.socket(SocketKind.DEALER), RequestEncoder()
    socket.connect("memory://in")
    for number in range(count):
        frames = encoder.encode(message_of(number))
        network.peer("memory://in").send([bytes(frame) for frame in frames])
    return socket


async def ids_read_after_the_end(socket: MemorySocket) -> list[str]:
    """What a reader reads that is cancelled before it has begun."""
    inbox = CountingInbox()
    async with trio.open_nursery() as nursery:
        nursery.cancel_scope.cancel()
        nursery.start_soon(read_requests, socket, Outbox(3, 0), Doorbell(), inbox, never)
    inbox.empty()
    return inbox.ids


async def test_what_has_arrived_is_read_at_the_end() -> None:
    count = 2 * MAX_LAST_MESSAGES
    ids = await ids_read_after_the_end(socket_with(MemoryNetwork(), count))
    assert ids == [str(number) for number in range(count)]


async def test_a_flood_does_not_hold_up_the_end(
    mock_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pumps, "MAX_LAST_MESSAGES", 3)
    network = SlowNetwork(mock_clock, LAST_READING_S * 0.4)
    ids = await ids_read_after_the_end(socket_with(network, 100))
    assert ids == ["0", "1", "2", *("3", "4", "5")]  # as many in any case, and as long as there is


@pytest.mark.parametrize(
    ("decoding_s", "rest_s"),
    [(1e-4, 1e-4 * MAX_MESSAGES_PER_SLICE * REST_PER_DECODING), (0.1, MAX_REST_S)],
)
async def test_requests_that_can_only_wait_are_read_slowly(
    mock_clock: MockClock, decoding_s: float, rest_s: float
) -> None:
    inbox = CountingInbox()
    socket = socket_with(SlowNetwork(mock_clock, decoding_s), MAX_MESSAGES_PER_SLICE + 1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(read_requests, socket, Outbox(3, 0), Doorbell(), inbox, always)
        for wait_s, num_read in ((0.0, 0), (rest_s * 0.99, 0), (rest_s * 0.02, 1)):
            mock_clock.jump(wait_s)
            await wait_all_tasks_blocked()
            inbox.empty()
            assert len(inbox.ids) == MAX_MESSAGES_PER_SLICE + num_read
        nursery.cancel_scope.cancel()


async def num_read_at_once(socket: MemorySocket, is_backed_up: Callable[[], bool]) -> int:
    inbox = CountingInbox()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(read_requests, socket, Outbox(3, 0), Doorbell(), inbox, is_backed_up)
        await wait_all_tasks_blocked()
        inbox.empty()
        num_read = len(inbox.ids)
        nursery.cancel_scope.cancel()
    return num_read


async def test_requests_that_may_start_are_read_at_once(mock_clock: MockClock) -> None:
    count = MAX_MESSAGES_PER_SLICE + 1
    socket = socket_with(SlowNetwork(mock_clock, 1e-4), count)
    assert await num_read_at_once(socket, never) == count


async def test_aborts_are_read_at_once(mock_clock: MockClock) -> None:
    count = MAX_MESSAGES_PER_SLICE + 1
    socket = socket_with(SlowNetwork(mock_clock, 1e-4), count, abort_of)
    assert await num_read_at_once(socket, always) == count


async def test_a_reader_takes_no_rest_for_the_time_in_which_it_waited(
    mock_clock: MockClock,
) -> None:
    inbox, outbox, room = CountingInbox(), Outbox(3, 0, limit_bytes=10), Doorbell()
    network, encoder = MemoryNetwork(), RequestEncoder()
    socket = socket_with(network, 0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(read_requests, socket, outbox, room, inbox, always)
        await wait_all_tasks_blocked()
        mock_clock.jump(10.0)  # waits for a message
        outbox.refuse("x", FinishReason.ERROR)
        for number in range(2):
            frames = encoder.encode(add_of(number))
            network.peer("memory://in").send([bytes(frame) for frame in frames])
            await wait_all_tasks_blocked()
        mock_clock.jump(10.0)  # holds "0", and waits for room
        outbox.take(0.0)
        room.ring()
        await wait_all_tasks_blocked()
        inbox.empty()
        assert inbox.ids == ["0", "1"]
        nursery.cancel_scope.cancel()


async def test_what_does_not_decode_is_passed_on_as_such(
    inputs: tuple[ZmqSocket, ZmqSocket],
) -> None:
    router, dealer = inputs
    inbox = CountingInbox()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(read_requests, dealer, Outbox(3, 0), Doorbell(), inbox, never)
        await router.send([PEER, b"\x07", b"?"])
        await inbox.doorbell.wait()
        (arrival,) = inbox.take()
        assert arrival.client_index == 3
        assert isinstance(arrival.message, UndecodableRequest)
        await send_aborts(router, "next")
        await inbox.wait_ids(1)
        nursery.cancel_scope.cancel()


async def test_a_socket_that_is_closed_ends_the_reader(
    inputs: tuple[ZmqSocket, ZmqSocket],
) -> None:
    _, dealer = inputs
    with pytest.RaisesGroup(trio.ClosedResourceError):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                read_requests, dealer, Outbox(3, 0), Doorbell(), CountingInbox(), never
            )
            await wait_all_tasks_blocked()
            dealer.close()


async def test_nothing_more_is_taken_of_a_client_whose_outbox_is_full(
    inputs: tuple[ZmqSocket, ZmqSocket],
) -> None:
    router, dealer = inputs
    outbox, room, inbox = Outbox(3, 0, limit_bytes=10), Doorbell(), CountingInbox()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(read_requests, dealer, outbox, room, inbox, never)
        await send_aborts(router, "a")
        await inbox.wait_ids(1)
        await stop_reading(router, dealer, outbox)
        inbox.empty()
        assert inbox.ids == ["a"]
        outbox.take(0.0)
        room.ring()
        await inbox.wait_ids(3)
        nursery.cancel_scope.cancel()
    assert inbox.ids == ["a", "b", "c"]


async def test_what_a_reader_holds_for_a_full_outbox_is_in_the_inbox_at_the_end(
    inputs: tuple[ZmqSocket, ZmqSocket],
) -> None:
    router, dealer = inputs
    outbox, inbox = Outbox(3, 0, limit_bytes=10), CountingInbox()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(read_requests, dealer, outbox, Doorbell(), inbox, never)
        await stop_reading(router, dealer, outbox)
        nursery.cancel_scope.cancel()
    inbox.empty()
    assert inbox.ids == ["b", "c"]


async def stop_reading(router: ZmqSocket, dealer: ZmqSocket, outbox: Outbox) -> None:
    """Fills an outbox whose reader waits at its socket: "b" it still reads, "c" it does not."""
    await wait_all_tasks_blocked()
    outbox.refuse("x", FinishReason.ERROR)
    assert outbox.is_full
    received = dealer.statistics().messages_received
    await send_aborts(router, "b")
    while dealer.statistics().messages_received == received:
        await trio.lowlevel.checkpoint()
    await send_aborts(router, "c")
    # Nobody waits at the socket now, so this takes no wake-up from anybody.
    while not dealer._poll_events() & Direction.RECEIVE:
        await trio.lowlevel.checkpoint()
    await wait_all_tasks_blocked()
    assert dealer.statistics().messages_received == received + 1


# Writing


def make_writer(push: ZmqSocket, outbox: Outbox) -> OutputWriter:
    return OutputWriter(push, outbox, time.monotonic, StepPhases(DeviceClock()))


async def receive(pull: ZmqSocket) -> EngineCoreOutputs:
    return OutputsDecoder().decode(await pull.receive())


async def test_each_flush_sends_what_was_put_in(outputs: tuple[ZmqSocket, ZmqSocket]) -> None:
    push, pull = outputs
    outbox = Outbox(0, 5)
    writer = make_writer(push, outbox)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(writer.run)
        for request_id in ("x", "y"):
            before = time.monotonic()
            outbox.refuse(request_id, FinishReason.ERROR)
            writer.flush()
            message = await receive(pull)
            assert [output.request_id for output in message.outputs] == [request_id]
            assert message.engine_index == 5
            assert before <= message.timestamp <= time.monotonic()
        writer.close()


async def test_the_last_words_are_outputs_then_answers_then_the_death_notice(
    outputs: tuple[ZmqSocket, ZmqSocket],
) -> None:
    push, pull = outputs
    outbox = Outbox(0, 0)
    outbox.mark_dead()
    outbox.put_utility_output(UtilityOutput(1, result=UtilityResult(None, 1)))
    outbox.put_utility_output(UtilityOutput(2, result=UtilityResult(None, 2)))
    outbox.refuse("x", FinishReason.ABORT)
    writer = make_writer(push, outbox)
    writer.close()
    await writer.run()
    assert [output.request_id for output in (await receive(pull)).outputs] == ["x"]
    for call_id in (1, 2):
        answer = (await receive(pull)).utility_output
        assert answer is not None
        assert answer.call_id == call_id
    assert await pull.receive() == [ENGINE_CORE_DEAD]


async def test_a_death_notice_is_not_sent_before_the_end(
    outputs: tuple[ZmqSocket, ZmqSocket],
) -> None:
    push, pull = outputs
    outbox = Outbox(0, 0)
    writer = make_writer(push, outbox)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(writer.run)
        outbox.mark_dead()
        writer.flush()
        await wait_all_tasks_blocked()
        assert push.statistics().messages_sent == 0
        outbox.refuse("x", FinishReason.ERROR)
        writer.close()
    assert (await receive(pull)).outputs
    assert await pull.receive() == [ENGINE_CORE_DEAD]


async def test_nothing_to_say_sends_nothing(outputs: tuple[ZmqSocket, ZmqSocket]) -> None:
    push, _ = outputs
    writer = make_writer(push, Outbox(0, 0))
    writer.flush()
    writer.close()
    await writer.run()
    assert push.statistics().messages_sent == 0


async def test_nothing_follows_the_death_notice(outputs: tuple[ZmqSocket, ZmqSocket]) -> None:
    push, pull = outputs
    outbox = Outbox(0, 0)
    outbox.mark_dead()
    writer = make_writer(push, outbox)
    writer.close()
    await writer.run()
    outbox.refuse("x", FinishReason.ERROR)
    writer.flush()
    assert push.statistics().messages_sent == 1
    assert await pull.receive() == [ENGINE_CORE_DEAD]


async def test_what_has_no_room_is_sent_in_order_and_merges_behind(
    context: ZmqContext, tmp_path: Path
) -> None:
    """A client that does not read holds up nobody, and costs one message for all that comes."""
    push = context.socket(SocketKind.PUSH, send_hwm=1)
    push.connect(f"ipc://{tmp_path}/out")  # it is not there yet: no buffers on the way
    outbox = Outbox(0, 0, limit_bytes=10)
    writer = make_writer(push, outbox)
    ids = [f"{number}-{'x' * 4096}" for number in range(200)]
    with trio.fail_after(TEST_TIMEOUT_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(writer.run)
            for request_id in ids:
                outbox.refuse(request_id, FinishReason.ERROR)
                writer.flush()
                await trio.lowlevel.checkpoint()
            assert push.statistics().messages_sent == 1
            assert outbox.is_full
            pull = context.socket(SocketKind.PULL)
            pull.bind(f"ipc://{tmp_path}/out")
            received: list[str] = []
            while len(received) < len(ids):
                received += [output.request_id for output in (await receive(pull)).outputs]
            assert received == ids
            # The one that waited, and all that had merged behind it.
            assert push.statistics().messages_sent == 3
            writer.close()


async def test_what_comes_behind_messages_that_wait_is_sent_when_they_are() -> None:
    network = MemoryNetwork()
    peer = network.peer("memory://out", room=2)
    socket = network.socket(SocketKind.PUSH)
    socket.connect("memory://out")
    outbox = Outbox(0, 0)
    writer = OutputWriter(socket, outbox, time.monotonic, StepPhases(DeviceClock()))
    decoder = OutputsDecoder()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(writer.run)
        for call_id in range(4):  # two have room, one waits for it, one waits behind
            outbox.put_utility_output(UtilityOutput(call_id, result=UtilityResult(None, 1)))
        writer.flush()
        await wait_all_tasks_blocked()
        outbox.refuse("x", FinishReason.ERROR)
        writer.flush()
        assert len(peer.take()) == 3
        writer.flush()  # there is room, but its task has not noticed yet
        await wait_all_tasks_blocked()
        answer, outputs = map(decoder.decode, peer.take())
        assert answer.utility_output is not None
        assert [output.request_id for output in outputs.outputs] == ["x"]
        writer.close()


async def test_a_broken_link_comes_up_in_the_task() -> None:
    network = MemoryNetwork()
    socket = network.socket(SocketKind.PUSH)
    socket.connect("memory://out")
    outbox = Outbox(0, 0)
    writer = OutputWriter(socket, outbox, time.monotonic, StepPhases(DeviceClock()))
    network.peer("memory://out").break_off()
    outbox.refuse("x", FinishReason.ERROR)
    writer.flush()
    with pytest.raises(trio.BrokenResourceError):
        await writer.run()


async def test_who_waits_for_room_is_told_when_all_was_sent(
    outputs: tuple[ZmqSocket, ZmqSocket], inputs: tuple[ZmqSocket, ZmqSocket]
) -> None:
    """Also where the outbox is no longer full by then, because a request was aborted."""
    push, _ = outputs
    router, dealer = inputs
    outbox, inbox = Outbox(3, 0, limit_bytes=800), CountingInbox()
    writer = make_writer(push, outbox)
    request = Request(make_request("x", [1]), SamplingParams(max_tokens=1), 10)
    outbox.append_token(request, 5)
    outbox.refuse("y", FinishReason.ERROR)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(read_requests, dealer, outbox, writer.room, inbox, never)
        await wait_all_tasks_blocked()
        outbox.drop(request)
        assert not outbox.is_full
        await send_aborts(router, "a")
        writer.flush()
        await inbox.wait_ids(1)
        nursery.cancel_scope.cancel()


async def test_a_fault_that_does_not_come_again_still_ends_the_task(
    outputs: tuple[ZmqSocket, ZmqSocket],
) -> None:
    faults = [RuntimeError("a bug of ours")]

    def clock() -> float:
        if faults:
            raise faults.pop()
        return 1.0

    outbox = Outbox(0, 0)
    writer = OutputWriter(outputs[0], outbox, clock, StepPhases(DeviceClock()))
    outbox.refuse("x", FinishReason.ERROR)
    writer.flush()
    with pytest.raises(RuntimeError, match="a bug of ours"):
        await writer.run()
