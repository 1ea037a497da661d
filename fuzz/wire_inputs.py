"""Where the wire's targets get likely inputs: msgpack of any shape, and vLLM's own messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from hypothesis import strategies as st

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trio_engine.wire.messages import Frames

_RECORDED = Path(__file__).parents[1] / "tests" / "data" / "vllm-0.25.1.json"


def recordings() -> Iterator[tuple[str, list[bytes]]]:
    """Every message recorded from vLLM 0.25.1: what kind it is, and its frames."""
    for vector in json.loads(_RECORDED.read_text()):
        yield vector["kind"], [bytes.fromhex(frame) for frame in vector["frames_hex"]]


def same_but_for_order(first: Frames, second: Frames) -> bool:
    """Whether two messages were encoded to the same; a set's members may come in any order."""
    return [sorted(bytes(frame)) for frame in first] == [sorted(bytes(frame)) for frame in second]


def values() -> st.SearchStrategy[Any]:
    """Whatever msgpack can say, in small."""
    scalars = (
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**64 - 1)
        | st.floats()
        | st.text(max_size=5)
        | st.binary(max_size=5)
        | st.builds(msgspec.msgpack.Ext, st.integers(-128, 127), st.binary(max_size=12))
        | st.sampled_from(["<f4", "float32", "|b1", [1], [2, 2]])
    )
    keys = st.text(max_size=5) | st.integers(-1, 9) | st.tuples(st.integers(0, 1))
    return st.recursive(
        scalars,
        lambda inner: st.lists(inner, max_size=13) | st.dictionaries(keys, inner, max_size=3),
        max_leaves=10,
    )


def bodies() -> st.SearchStrategy[bytes]:
    """One frame of msgpack, or of noise."""
    return values().map(msgspec.msgpack.encode) | st.binary(max_size=60)


def aux_frames() -> st.SearchStrategy[list[bytes]]:
    return st.lists(st.binary(max_size=16), max_size=2)


@st.composite
def changed_frames(draw: st.DrawFn, frames: list[bytes]) -> list[bytes]:
    """The frames with some bytes of one of them overwritten, and perhaps its end cut off."""
    index = draw(st.integers(0, len(frames) - 1))
    frame = bytearray(frames[index])
    places = st.integers(0, max(0, len(frame) - 1))
    for place, byte in draw(st.lists(st.tuples(places, st.integers(0, 255)), max_size=4)):
        frame[place : place + 1] = bytes([byte])
    end = draw(st.integers(0, len(frame))) if draw(st.booleans()) else len(frame)
    return [*frames[:index], bytes(frame[:end]), *frames[index + 1 :]]
