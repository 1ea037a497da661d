"""Any frames decode to outputs or raise ProtocolError, and nothing else.

Outputs that decode can also be encoded, and decode again to the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import strategies as st

from fuzz.target import Target, join, split
from fuzz.wire_inputs import aux_frames, bodies, changed_frames, recordings, same_but_for_order
from trio_engine.errors import ProtocolError
from trio_engine.wire.codec import OutputsDecoder, OutputsEncoder, is_engine_core_dead

if TYPE_CHECKING:
    from collections.abc import Iterator


def check(data: bytes) -> bool:
    frames = split(data)
    decoder = OutputsDecoder()
    try:
        outputs = decoder.decode(frames)
    except ProtocolError:
        return False
    assert not is_engine_core_dead(frames)
    encoded = OutputsEncoder().encode(outputs)
    again = OutputsEncoder().encode(decoder.decode(encoded))
    assert same_but_for_order(encoded, again)
    return True


def make_seeds() -> Iterator[bytes]:
    for kind, frames in recordings():
        if kind in ("EngineCoreOutputs", "raw frame"):
            yield join(frames)


def _changed_recordings() -> st.SearchStrategy[list[bytes]]:
    return st.sampled_from(list(make_seeds())).map(split).flatmap(changed_frames)


def _made_up() -> st.SearchStrategy[list[bytes]]:
    return st.builds(lambda body, aux: [body, *aux], bodies(), aux_frames())


TARGET = Target(
    "output_frames",
    __doc__,
    check,
    st.binary(max_size=300) | _made_up().map(join) | _changed_recordings().map(join),
    make_seeds,
)
