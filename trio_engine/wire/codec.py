"""Messages to and from frames, typed: requests, outputs, and single-frame control messages.

Pure. The one place where msgspec's errors become ``ProtocolError``. Encoders and decoders hold
the state of the message at hand, so each task or thread has its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from trio_engine.errors import ProtocolError, brief
from trio_engine.outputs import EngineCoreOutputs
from trio_engine.requests import EngineCoreRequest
from trio_engine.wire.arrays import ArrayReader, ArrayWriter, ext_hook
from trio_engine.wire.messages import (
    ENGINE_CORE_DEAD,
    AbortRequest,
    EngineCoreRequestType,
    StartDPWave,
    UtilityCall,
)
from trio_engine.wire.undecodable import UndecodableRequest as UndecodableRequest, salvage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trio_engine.wire.messages import Buffer, EngineCoreMessage, Frames

T = TypeVar("T")

# Beside msgspec's own: hooks and numpy (ValueError, TypeError), integers beyond 64 bits, nesting
# beyond the interpreter's limit, and arrays that claim more elements than memory has.
_CODEC_ERRORS = (
    msgspec.MsgspecError,
    ValueError,
    TypeError,
    OverflowError,
    RecursionError,
    MemoryError,
)

# By plain bytes: an Enum member hashes as its name, so it does not find itself by value.
_KINDS = {kind.value: kind for kind in EngineCoreRequestType}

_KIND_OF_MESSAGE: dict[type[EngineCoreMessage], EngineCoreRequestType] = {
    EngineCoreRequest: EngineCoreRequestType.ADD,
    AbortRequest: EngineCoreRequestType.ABORT,
    StartDPWave: EngineCoreRequestType.START_DP_WAVE,
    UtilityCall: EngineCoreRequestType.UTILITY,
}

_CONTROL_ENCODER = msgspec.msgpack.Encoder()


class _BodyEncoder:
    """Body and aux frames of any struct. Every call makes new bytes: ZeroMQ may hold the old."""

    def __init__(self, *, give_up_arrays: bool) -> None:
        self._arrays = ArrayWriter(give_up_arrays=give_up_arrays)
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._arrays.enc_hook)

    def encode(self, body: object) -> Frames:
        try:
            encoded = self._encoder.encode(body)
        except _CODEC_ERRORS as error:
            self._arrays.take_frames()
            raise ProtocolError(f"cannot encode {type(body).__name__}: {error}") from error
        return [encoded, *self._arrays.take_frames()]


class RequestEncoder:
    """Encodes what a front end or the coordinator sends to an engine.

    A request's arrays stay the caller's: their frames are writable where the arrays are, and
    transport copies those.
    """

    def __init__(self) -> None:
        self._body = _BodyEncoder(give_up_arrays=False)

    def encode(self, message: EngineCoreMessage) -> Frames:
        """Frames ``[type, body, aux...]``; large arrays are referred to, not copied.

        Raises:
            ProtocolError: the message holds something that has no wire form.
        """
        body = message.request_ids if isinstance(message, AbortRequest) else message
        kind = _KIND_OF_MESSAGE[type(message)]
        return [kind.value, *self._body.encode(body)]


class RequestDecoder:
    """Decodes what an engine receives."""

    def __init__(self) -> None:
        self._arrays = ArrayReader()
        self._decoders = {
            EngineCoreRequestType.ADD: self._decoder(EngineCoreRequest),
            # A bare string is one id. Nil is refused: it must never mean "all of them".
            EngineCoreRequestType.ABORT: self._decoder(list[str] | str),
            EngineCoreRequestType.START_DP_WAVE: self._decoder(StartDPWave),
            EngineCoreRequestType.UTILITY: self._decoder(UtilityCall),
        }

    def _decoder(self, body_type: Any) -> msgspec.msgpack.Decoder[Any]:
        return msgspec.msgpack.Decoder(body_type, dec_hook=self._arrays.dec_hook, ext_hook=ext_hook)

    def decode(self, frames: Sequence[Buffer]) -> EngineCoreMessage:
        """The message in ``frames``. Arrays in it are views of the frames.

        Raises:
            UndecodableRequest: for any bytes that are not a message. Nothing else is raised.
        """
        kind = _read_kind(frames)
        if len(frames) < 2:
            raise UndecodableRequest(f"{kind.name} without a body", kind=kind)
        self._arrays.frames = frames[2:]
        try:
            message = self._decoders[kind].decode(frames[1])
        except _CODEC_ERRORS as error:
            reason = f"cannot decode {kind.name}: {brief(str(error))}"
            raise salvage(reason, kind, frames[1]) from error
        finally:
            self._arrays.frames = ()
        if kind is EngineCoreRequestType.ABORT:
            return AbortRequest([message] if isinstance(message, str) else message)
        return message  # type: ignore[no-any-return]


class OutputsEncoder:
    """Encodes what an engine sends to a client. Arrays in outputs must not change any more."""

    def __init__(self) -> None:
        self._body = _BodyEncoder(give_up_arrays=True)

    def encode(self, outputs: EngineCoreOutputs) -> Frames:
        """Frames ``[body, aux...]``; large arrays are referred to, not copied.

        Raises:
            ProtocolError: the outputs (a utility's result, say) hold something that has no wire
                form.
        """
        return self._body.encode(outputs)


class OutputsDecoder:
    """Decodes what a client or the coordinator receives from an engine."""

    def __init__(self) -> None:
        self._arrays = ArrayReader()
        self._decoder = msgspec.msgpack.Decoder(
            EngineCoreOutputs, dec_hook=self._arrays.dec_hook, ext_hook=ext_hook
        )

    def decode(self, frames: Sequence[Buffer]) -> EngineCoreOutputs:
        """The outputs in ``frames``. Arrays in them are views of the frames.

        Raises:
            ProtocolError: for any bytes that are not outputs (``ENGINE_CORE_DEAD`` is not: ask
                ``is_engine_core_dead`` first). Nothing else is raised.
        """
        if not frames:
            raise ProtocolError("outputs message without frames")
        self._arrays.frames = frames[1:]
        try:
            return self._decoder.decode(frames[0])
        except _CODEC_ERRORS as error:
            raise ProtocolError(f"cannot decode EngineCoreOutputs: {brief(str(error))}") from error
        finally:
            self._arrays.frames = ()


def is_engine_core_dead(frames: Sequence[Buffer]) -> bool:
    """Whether this is the last word of an engine that failed."""
    return len(frames) == 1 and frames[0] == ENGINE_CORE_DEAD


def encode_control(message: object) -> bytes:
    """One frame of a handshake or coordinator struct of ``wire.messages``.

    Raises:
        ProtocolError: a value has no wire form.
    """
    try:
        return _CONTROL_ENCODER.encode(message)
    except _CODEC_ERRORS as error:
        raise ProtocolError(f"cannot encode {type(message).__name__}: {error}") from error


def decode_control(frame: Buffer, message_type: type[T]) -> T:
    """A handshake or coordinator struct from one frame; unknown keys are ignored.

    Raises:
        ProtocolError: for any bytes that are not such a message. Nothing else is raised.
    """
    try:
        return msgspec.msgpack.decode(frame, type=message_type, ext_hook=ext_hook)
    except _CODEC_ERRORS as error:
        reason = brief(str(error))
        raise ProtocolError(f"cannot decode {message_type.__name__}: {reason}") from error


def _read_kind(frames: Sequence[Buffer]) -> EngineCoreRequestType:
    if not frames:
        raise UndecodableRequest("message without frames")
    kind = _KINDS.get(bytes(frames[0][:2]))
    if kind is None:
        raise UndecodableRequest(f"unknown request type {bytes(frames[0][:16])!r}")
    return kind
