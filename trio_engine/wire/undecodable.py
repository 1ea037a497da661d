"""What can still be read of a message to the engine that does not decode.

Pure. With the request's id or the call's the engine can answer, so that its sender need not wait
for ever. This is a courtesy to mistaken peers: nothing read here is ever acted on otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from trio_engine.errors import ProtocolError
from trio_engine.wire.messages import EngineCoreRequestType

if TYPE_CHECKING:
    from trio_engine.wire.messages import Buffer

# Places in the body of an ADD.
REQUEST_ID, POOLING_PARAMS, CLIENT_INDEX = 0, 4, 11

_NUM_LEADING_SCALARS = 2
_ARRAY_HEADER_BYTES = {0xDC: 3, 0xDD: 5}
_NUMBER_BYTES = {0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9, 0xD0: 2, 0xD1: 3, 0xD2: 5, 0xD3: 9}
_STRING_LENGTH_BYTES = {0xD9: 1, 0xDA: 2, 0xDB: 4}

# Pickled data makes a message undecodable, but must not hide whose it is.
_UNTYPED = msgspec.msgpack.Decoder(ext_hook=lambda _code, _data: None)


class UndecodableRequest(ProtocolError):
    """A message to the engine that breaks the protocol, with what could still be read of it.

    Attributes:
        kind: None if the type frame is not one of ``EngineCoreRequestType``.
        request_id: of an ADD, if readable: answer it with an ERROR output.
        client_index: as sent, else 0. Trust the socket that the message came by more than this.
        call_id: of a UTILITY, if readable: answer it with a failure.
        is_pooling: an ADD with pooling parameters, whose end must carry a ``pooling_output``.
    """

    def __init__(
        self,
        message: str,
        *,
        kind: EngineCoreRequestType | None = None,
        request_id: str | None = None,
        client_index: int = 0,
        call_id: int | None = None,
        is_pooling: bool = False,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.request_id = request_id
        self.client_index = client_index
        self.call_id = call_id
        self.is_pooling = is_pooling


def salvage(message: str, kind: EngineCoreRequestType, body: Buffer) -> UndecodableRequest:
    """The error for ``body``, with as much of its sender's identity as can be read."""
    fields = _fields(body)
    if kind is EngineCoreRequestType.ADD:
        request_id = _at(fields, REQUEST_ID)
        return UndecodableRequest(
            message,
            kind=kind,
            request_id=request_id if isinstance(request_id, str) else None,
            client_index=_index(_at(fields, CLIENT_INDEX)) or 0,
            is_pooling=_at(fields, POOLING_PARAMS) is not None,
        )
    if kind is EngineCoreRequestType.UTILITY:
        return UndecodableRequest(
            message,
            kind=kind,
            client_index=_index(_at(fields, 0)) or 0,
            call_id=_index(_at(fields, 1)),
        )
    return UndecodableRequest(message, kind=kind)


def _at(fields: list[Any], place: int) -> Any:
    return fields[place] if place < len(fields) else None


def _index(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _fields(body: Buffer) -> list[Any]:
    try:
        value = _UNTYPED.decode(body)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return _leading_scalars(memoryview(body))
    return value if isinstance(value, list) else []


def _leading_scalars(body: memoryview) -> list[Any]:
    """First fields of an array whose rest is cut off, too deep, or not UTF-8."""
    scalars: list[Any] = []
    place = _array_header_bytes(body)
    while place and len(scalars) < _NUM_LEADING_SCALARS:
        end = place + _scalar_bytes(body[place : place + 5])
        try:
            scalars.append(_UNTYPED.decode(body[place:end]))
        except msgspec.DecodeError:
            break
        place = end
    return scalars


def _array_header_bytes(body: memoryview) -> int:
    """0 if the body does not begin as an array does."""
    first = body[0] if body.nbytes else 0
    return 1 if first & 0xF0 == 0x90 else _ARRAY_HEADER_BYTES.get(first, 0)


def _scalar_bytes(head: memoryview) -> int:
    """Length of the string or number that begins so; too short for anything else."""
    first = head[0] if head.nbytes else 0
    if first & 0xE0 == 0xA0:
        return 1 + (first & 0x1F)
    if first in _STRING_LENGTH_BYTES:
        end = 1 + _STRING_LENGTH_BYTES[first]
        return end + int.from_bytes(head[1:end], "big")
    return _NUMBER_BYTES.get(first, 1)
