"""The engine's side of start-up: handshake, load, announcement. Every wait has an end.

Engine. What is said and checked is decided by ``wire.handshake``; here it is sent and awaited.
ZeroMQ is imported by those who need it: an engine in its client's process has no sockets.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import trio

from trio_engine.engine.forward_thread import Broken, Loaded
from trio_engine.errors import EngineError, EngineStartError
from trio_engine.wire.messages import COORDINATOR_READY, SUBSCRIBE_TO_ALL, ReadyResponse

if TYPE_CHECKING:
    from trio_engine.core.plan import ExecutorProperties
    from trio_engine.engine.doorbell import Doorbell, ThreadSafeDoorbell
    from trio_engine.engine.forward_thread import ForwardThread
    from trio_engine.transport.base import MessageContext, MessageSocket
    from trio_engine.wire.handshake import EngineHandshake
    from trio_engine.wire.messages import EngineZmqAddresses

logger = logging.getLogger(__name__)

VLLM_VERSION = "0.25.1"
"""The release whose protocol this engine speaks; front ends read it, none checks it."""

# The reference's values: a front end that is not up yet must still get HELLO.
HANDSHAKE_LINGER_S = 5.0


async def greet(
    context: MessageContext, handshake: EngineHandshake, address: str, timeout_s: float
) -> MessageSocket:
    """Sends HELLO and waits for INIT, which ``handshake`` then holds.

    Returns:
        The handshake socket, for READY.

    Raises:
        EngineStartError: no INIT in time.
        ProtocolError: what came is not an INIT.
        ConfigError: the address cannot be connected to.
    """
    from trio_engine.transport.socket import SocketKind

    socket = context.socket(
        SocketKind.DEALER, identity=handshake.identity, linger_s=HANDSHAKE_LINGER_S
    )
    socket.connect(address)
    logger.info("front_end_awaited address=%s timeout_s=%g", address, timeout_s)
    with trio.move_on_after(timeout_s):
        await socket.send([handshake.hello()])
        handshake.receive_init(await socket.receive())
        return socket
    raise EngineStartError(
        f"no INIT from the front end at {address} within {timeout_s:g} s (handshake_timeout_s);"
        f" it was told {handshake.describe_hello()}"
    )


async def wait_loaded(
    forward: ForwardThread, doorbell: Doorbell | ThreadSafeDoorbell
) -> ExecutorProperties:
    """Waits for the executor. A load has no limit of its own: only its size knows one.

    Raises:
        EngineError: the load failed; by whose fault is in its type.
        EngineStartError: it failed in a way that nobody foresaw.
    """
    while not forward.events:
        await doorbell.wait()
    event = forward.events.popleft()
    if isinstance(event, Broken):
        if isinstance(event.error, EngineError):
            raise event.error
        raise EngineStartError(f"the executor did not load: {event.error!r}") from event.error
    assert isinstance(event, Loaded), event
    return event.properties


def describe(
    properties: ExecutorProperties, max_model_len: int, addresses: EngineZmqAddresses
) -> ReadyResponse:
    """What an engine announces on each input socket."""
    num_tokens = properties.num_blocks * properties.block_size
    return ReadyResponse(
        max_model_len=max_model_len,
        num_gpu_blocks=properties.num_blocks,
        block_size=properties.block_size,
        dp_stats_address=addresses.frontend_stats_publish_address,
        dtype=properties.dtype,
        vllm_version=VLLM_VERSION,
        world_size=1,
        data_parallel_size=1,
        kv_cache_size_tokens=num_tokens,
        kv_cache_max_concurrency=num_tokens / max_model_len,
    )


async def wait_coordinator(context: MessageContext, address: str) -> None:
    """Subscribes at the coordinator and waits for its word that all engines have.

    The front end waits for this engine without a limit, and the coordinator for the slowest
    engine: a limit here could only be wrong. Being asked to stop ends the wait. Waves are for
    mixture-of-experts ranks, so nothing is read after that.
    """
    from trio_engine.transport.socket import SocketKind

    socket = context.socket(SocketKind.XSUB)
    socket.connect(address)
    await socket.send([SUBSCRIBE_TO_ALL])
    while (await socket.receive())[0] != COORDINATOR_READY:
        logger.debug("coordinator_message_ignored")
