"""Large messages are read as they were sent, however late that is and whatever changed since."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import trio

from trio_engine.outputs import EngineCoreOutput, EngineCoreOutputs
from trio_engine.requests import EngineCoreRequest
from trio_engine.tensors import TensorData
from trio_engine.testing.requests import make_request
from trio_engine.transport.context import ZmqContext, open_context
from trio_engine.transport.socket import SocketKind
from trio_engine.wire.codec import OutputsDecoder, OutputsEncoder, RequestDecoder, RequestEncoder

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from trio_engine.transport.socket import ZmqSocket

pytestmark = pytest.mark.known_fault(kind="overwritten-buffer")

TEST_TIMEOUT_S = 120.0
"""No test here waits for time to pass; this ends one that would hang."""
BODY_BYTES = 8 << 20
TENSOR_ITEMS = 256
"""Of float32: 1 KiB, which travels in a frame of its own behind the large one."""


@pytest.fixture
async def context() -> AsyncIterator[ZmqContext]:
    with trio.fail_after(TEST_TIMEOUT_S):
        async with open_context() as made:
            yield made


def tensor(value: float) -> TensorData:
    return TensorData.from_numpy(np.full(TENSOR_ITEMS, value, np.float32))


def outputs(letter: str) -> EngineCoreOutputs:
    """A body of 8 MiB and one tensor, both told by the letter."""
    entry = EngineCoreOutput(
        letter,
        [ord(letter)],
        trace_headers={"pad": letter * BODY_BYTES},
        pooling_output=tensor(ord(letter)),
    )
    return EngineCoreOutputs(outputs=[entry], timestamp=1.0)


async def test_two_outputs_to_a_client_that_reads_late_arrive_as_they_were(
    context: ZmqContext, tmp_path: Path
) -> None:
    pull = context.socket(SocketKind.PULL, receive_hwm=1, buffer_bytes=4096)
    push = context.socket(SocketKind.PUSH, send_hwm=4, buffer_bytes=4096)
    push.connect(f"ipc://{tmp_path}/out")
    encoder, decoder = OutputsEncoder(), OutputsDecoder()  # one each, as a writer has
    for letter in "ab":
        await push.send(encoder.encode(outputs(letter)))
    assert push.statistics().uncopied_frames_in_flight == 2
    pull.bind(f"ipc://{tmp_path}/out")  # before that nothing can leave
    for letter in "ab":
        assert decoder.decode(await pull.receive()) == outputs(letter)


async def router_and_dealer(context: ZmqContext) -> tuple[ZmqSocket, ZmqSocket]:
    router = context.socket(SocketKind.ROUTER, buffer_bytes=4096)
    dealer = context.socket(SocketKind.DEALER, identity=b"e", receive_hwm=1, buffer_bytes=4096)
    dealer.connect(router.bind("tcp://127.0.0.1:0"))
    await dealer.send([b"hello"])
    await router.receive()
    return router, dealer


@pytest.mark.parametrize("num_items", [TENSOR_ITEMS, BODY_BYTES // 4])
async def test_an_add_whose_tensor_is_changed_right_after_the_send_arrives_as_it_was(
    context: ZmqContext, num_items: int
) -> None:
    router, dealer = await router_and_dealer(context)
    encoder, decoder = RequestEncoder(), RequestDecoder()
    embeddings = np.zeros(num_items, np.float32)
    for number in (1, 2):
        embeddings[:] = number
        request = make_request(f"r{number}", [number])
        request.prompt_embeds = TensorData.from_numpy(embeddings)
        await router.send([b"e", *encoder.encode(request)])
        embeddings[:] = 99
    for number in (1, 2):
        received = decoder.decode(await dealer.receive())
        assert isinstance(received, EngineCoreRequest)
        assert received.prompt_embeds is not None
        assert set(received.prompt_embeds.to_numpy().tolist()) == {number}
