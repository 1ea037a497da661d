"""Start-up of engines at a front end, as two state machines that do no I/O.

Pure. Each takes the frames that arrived and says what to send; sockets, time limits and the
processes behind them belong to ``engine`` and ``client``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from trio_engine.errors import ConfigError, ProtocolError
from trio_engine.wire.codec import decode_control, encode_control
from trio_engine.wire.messages import (
    EngineStatus,
    EngineZmqAddresses,
    Frames,
    Init,
    ReadyResponse,
    StatusMessage,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from trio_engine.wire.messages import Buffer

IDENTITY_BYTES = 2


def engine_identity(engine_index: int) -> bytes:
    """Routing identity of an engine's handshake and input sockets.

    Raises:
        ConfigError: the index does not fit.
    """
    if not 0 <= engine_index < 1 << 8 * IDENTITY_BYTES:
        raise ConfigError(f"engine_index must be 0 to 65535, got {engine_index}")
    return engine_index.to_bytes(IDENTITY_BYTES, "little")


class EngineHandshake:
    """An engine's side: HELLO, INIT, ready response on each input, READY.

    Args:
        engine_index: its rank, 0 to 65535.
        local: the front end spawned this process.
        headless: started apart from a front end.
        parallel_config_hash: of mixture-of-experts ranks.

    Attributes:
        identity: routing identity of the handshake socket and of every input socket.
        addresses: from INIT, None before.
        parallel_config: from INIT.
    """

    def __init__(
        self,
        engine_index: int,
        *,
        local: bool,
        headless: bool,
        parallel_config_hash: str | None = None,
    ) -> None:
        self.identity = engine_identity(engine_index)
        self.addresses: EngineZmqAddresses | None = None
        self.parallel_config: dict[str, Any] = {}
        self._status = StatusMessage(status=EngineStatus.HELLO, local=local, headless=headless)
        self._parallel_config_hash = parallel_config_hash

    def hello(self) -> bytes:
        """First frame to the handshake socket."""
        return encode_control(self._status)

    def describe_hello(self) -> str:
        """What HELLO says, in words: a front end that waits for another engine ignores it."""
        index = int.from_bytes(self.identity, "little")
        status = self._status
        return f"HELLO of engine {index}, local={status.local} headless={status.headless}"

    def receive_init(self, frames: Sequence[Buffer]) -> EngineZmqAddresses:
        """Reads the front end's answer; keeps ``addresses`` and ``parallel_config``.

        Raises:
            ProtocolError: not an INIT, a second one, or inputs and outputs do not pair.
        """
        if self.addresses is not None:
            raise ProtocolError("second INIT")
        if len(frames) != 1:
            raise ProtocolError(f"INIT of {len(frames)} frames, expected one")
        init = decode_control(frames[0], Init)
        addresses = init.addresses
        if len(addresses.inputs) != len(addresses.outputs):
            raise ProtocolError(
                f"INIT has {len(addresses.inputs)} inputs and {len(addresses.outputs)} outputs"
            )
        self.addresses, self.parallel_config = addresses, init.parallel_config
        return addresses

    def ready_response(self, response: ReadyResponse) -> bytes:
        """First frame to each input socket.

        Raises:
            RuntimeError: INIT has not come yet.
        """
        self._require_init()
        return encode_control(response)

    def ready(self) -> bytes:
        """Last frame to the handshake socket.

        Raises:
            RuntimeError: INIT has not come yet.
        """
        self._require_init()
        return encode_control(
            msgspec.structs.replace(
                self._status,
                status=EngineStatus.READY,
                parallel_config_hash=self._parallel_config_hash,
            )
        )

    def _require_init(self) -> None:
        if self.addresses is None:
            raise RuntimeError("the front end's INIT has not been received")


class ExpectedEngine(msgspec.Struct, frozen=True):
    """An engine that a front end waits for. ``headless`` None is not looked at."""

    index: int
    local: bool
    headless: bool | None = None


class HandshakeStep(msgspec.Struct, frozen=True, kw_only=True):
    """What one received message led to.

    Attributes:
        engine_index: the sender; None for a stranger.
        reply: frames to send back on the same socket, identity first; None for none.
        ready_response: what the engine announced (None also for an empty announcement).
        ignored: why the message was dropped, for a log line; None if it counted.
    """

    engine_index: int | None
    reply: Frames | None = None
    ready_response: ReadyResponse | None = None
    ignored: str | None = None


class _Progress:
    """How far one expected engine has come."""

    __slots__ = ("announced", "expected", "hello", "ready", "response")

    def __init__(self, expected: ExpectedEngine) -> None:
        self.expected = expected
        self.hello = self.ready = self.announced = False
        self.response: ReadyResponse | None = None

    def missing(self) -> list[str]:
        parts = {"HELLO": self.hello, "READY": self.ready, "ready response": self.announced}
        return [f"engine {self.expected.index}: {part}" for part, done in parts.items() if not done]

    def take_status(self, message: StatusMessage) -> None:
        """Moves on by a HELLO or READY, or refuses it."""
        expected, is_hello = self.expected, message.status is EngineStatus.HELLO
        if message.local != expected.local or expected.headless not in (None, message.headless):
            raise ProtocolError(_describe_mismatch(message, expected))
        if is_hello == self.hello or self.ready:
            raise ProtocolError(f"engine {expected.index} sent {message.status} out of turn")
        self.hello, self.ready = True, not is_hello


def _describe_mismatch(message: StatusMessage, expected: ExpectedEngine) -> str:
    """What an engine says of itself and what it should say, and which option decides that."""
    said, wanted = f"local={message.local}", f"local={expected.local}"
    if expected.headless is not None:
        said += f" headless={message.headless}"
        wanted += f" headless={expected.headless}"
    return (
        f"engine {expected.index} says {said}, expected {wanted}"
        " (with --headless an engine says local=False headless=True)"
    )


class FrontEndHandshake:
    """A front end's side: waits for HELLO, READY and ready response of every expected engine.

    What comes on the handshake socket and what comes on the input may interleave in any way. A
    stranger's message is ignored with a reason; an expected engine that breaks the protocol ends
    the start-up.

    Args:
        addresses: what each engine is told in INIT.
        expected: the engines; nobody else is admitted.
        parallel_config: for mixture-of-experts ranks.
    """

    def __init__(
        self,
        addresses: EngineZmqAddresses,
        expected: Iterable[ExpectedEngine],
        *,
        parallel_config: dict[str, Any] | None = None,
    ) -> None:
        self.addresses = addresses
        self._init = encode_control(
            Init(addresses=addresses, parallel_config=parallel_config or {})
        )
        self._engines = {engine_identity(engine.index): _Progress(engine) for engine in expected}
        self._hashes: dict[str | None, int] = {}  # parallel_config_hash -> first engine with it

    @property
    def is_complete(self) -> bool:
        """Whether every expected engine has said READY and announced itself at the input."""
        return not self.missing()

    @property
    def ready_responses(self) -> dict[int, ReadyResponse | None]:
        """By engine index, of those that came; None where the announcement was empty."""
        return {
            engine.expected.index: engine.response
            for engine in self._engines.values()
            if engine.announced
        }

    def missing(self) -> list[str]:
        """What has not come yet, in words, for the message of a timeout."""
        return [part for engine in self._engines.values() for part in engine.missing()]

    def receive(self, frames: Sequence[Buffer]) -> HandshakeStep:
        """Takes ``[identity, payload]`` from the handshake socket.

        Raises:
            ProtocolError: an expected engine sent garbage, HELLO or READY out of turn, or is
                not of the expected kind.
        """
        engine = self._sender(frames)
        if engine is None:
            return _stranger(frames)
        index = engine.expected.index
        message = decode_control(_payload(index, frames), StatusMessage)
        engine.take_status(message)
        if message.status is EngineStatus.HELLO:
            return HandshakeStep(engine_index=index, reply=[engine_identity(index), self._init])
        self._check_hash(index, message.parallel_config_hash)
        return HandshakeStep(engine_index=index)

    def receive_ready_response(self, frames: Sequence[Buffer]) -> HandshakeStep:
        """Takes ``[identity, payload]`` from the input socket.

        Raises:
            ProtocolError: an expected engine sent garbage or announced itself twice.
        """
        engine = self._sender(frames)
        if engine is None:
            return _stranger(frames)
        index = engine.expected.index
        payload = _payload(index, frames)
        if engine.announced:
            raise ProtocolError(f"engine {index} sent a second ready response")
        # vLLM's front end takes an empty one as "here, nothing to tell".
        response = decode_control(payload, ReadyResponse) if len(payload) else None
        engine.announced, engine.response = True, response
        return HandshakeStep(engine_index=index, ready_response=response)

    def _sender(self, frames: Sequence[Buffer]) -> _Progress | None:
        return self._engines.get(bytes(frames[0])) if frames else None

    def _check_hash(self, index: int, parallel_config_hash: str | None) -> None:
        # Without vLLM's configuration the hash itself means nothing to us, but ranks that step
        # together must agree on it.
        first = self._hashes.setdefault(parallel_config_hash, index)
        if len(self._hashes) > 1:
            others = sorted(set(self._hashes.values()) - {first})
            raise ProtocolError(
                f"engine {index} differs from engine {others[0]} in its parallel config"
            )


def _payload(index: int, frames: Sequence[Buffer]) -> Buffer:
    if len(frames) != 2:
        raise ProtocolError(f"engine {index} sent {len(frames) - 1} frames, expected one")
    return frames[1]


def _stranger(frames: Sequence[Buffer]) -> HandshakeStep:
    identity = bytes(frames[0][:16]) if frames else b""
    return HandshakeStep(engine_index=None, ignored=f"unexpected identity {identity!r}")
