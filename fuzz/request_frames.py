"""Any frames decode to a message or raise UndecodableRequest, and nothing else.

A message that decodes can also be encoded, and decodes again to the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import strategies as st

from fuzz.target import Target, join, split
from fuzz.wire_inputs import aux_frames, bodies, changed_frames, recordings, same_but_for_order
from trio_engine.wire.codec import RequestDecoder, RequestEncoder, UndecodableRequest
from trio_engine.wire.messages import EngineCoreRequestType

if TYPE_CHECKING:
    from collections.abc import Iterator

_KINDS = [kind.value for kind in EngineCoreRequestType]
_KIND_OF_RECORDING = {
    "EngineCoreRequest": b"\x00",
    "abort body": b"\x01",
    "wave body": b"\x02",
    "utility body": b"\x03",
}


def check(data: bytes) -> bool:
    decoder = RequestDecoder()
    try:
        message = decoder.decode(split(data))
    except UndecodableRequest as error:
        assert error.request_id is None or isinstance(error.request_id, str)
        assert error.call_id is None or error.call_id >= 0
        assert error.client_index >= 0
        return False
    frames = RequestEncoder().encode(message)
    again = RequestEncoder().encode(decoder.decode(frames))
    assert same_but_for_order(frames, again)
    return True


def make_seeds() -> Iterator[bytes]:
    for kind, frames in recordings():
        if kind in _KIND_OF_RECORDING:
            yield join([_KIND_OF_RECORDING[kind], *frames])


def _changed_recordings() -> st.SearchStrategy[list[bytes]]:
    return st.sampled_from(list(make_seeds())).map(split).flatmap(changed_frames)


def _made_up() -> st.SearchStrategy[list[bytes]]:
    kinds = st.sampled_from(_KINDS) | st.binary(max_size=3)
    return st.builds(lambda kind, body, aux: [kind, body, *aux], kinds, bodies(), aux_frames())


TARGET = Target(
    "request_frames",
    __doc__,
    check,
    st.binary(max_size=300) | _made_up().map(join) | _changed_recordings().map(join),
    make_seeds,
)
