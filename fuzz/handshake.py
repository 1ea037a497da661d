"""Any messages at start-up make progress, are ignored, or raise ProtocolError, at either side.

The input is a sequence of messages: each begins with a byte that says who receives it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import strategies as st

from fuzz.target import Target, join, split
from fuzz.wire_inputs import bodies, recordings
from trio_engine.errors import ProtocolError
from trio_engine.wire.handshake import EngineHandshake, ExpectedEngine, FrontEndHandshake
from trio_engine.wire.messages import EngineZmqAddresses, ReadyResponse

if TYPE_CHECKING:
    from collections.abc import Iterator

_ENGINES = (0, 1)
_IDENTITY = b"\x00\x00"
# To the front end's handshake socket, to its input socket, and to an engine.
_STATUS, _RESPONSE, _INIT = 0, 1, 2
_NUM_RECEIVERS = 3


def check(data: bytes) -> bool:
    front_end = FrontEndHandshake(
        EngineZmqAddresses(inputs=["ipc:///in"], outputs=["ipc:///out"]),
        [ExpectedEngine(index, local=False) for index in _ENGINES],
    )
    engine = EngineHandshake(0, local=False, headless=True)
    engine.hello()
    try:
        results = [_deliver(message, front_end, engine) for message in split(data)]
    except ProtocolError:
        return False
    finally:
        missing = front_end.missing()
        assert front_end.is_complete == (not missing)
        assert len(missing) <= 3 * len(_ENGINES)
        assert front_end.ready_responses.keys() <= set(_ENGINES)
    return any(results)


def _deliver(message: bytes, front_end: FrontEndHandshake, engine: EngineHandshake) -> bool:
    receiver = message[0] % _NUM_RECEIVERS if message else _STATUS
    if receiver == _INIT:
        addresses = engine.receive_init([message[1:]])
        assert len(addresses.inputs) == len(addresses.outputs)
        assert engine.ready()
        return True
    frames = split(message[1:])
    receive = front_end.receive if receiver == _STATUS else front_end.receive_ready_response
    before = front_end.missing()
    step = receive(frames)
    # What counts is progress, what does not says why, and an answer goes to its sender.
    assert (step.ignored is None) == (front_end.missing() != before)
    assert (step.engine_index is None) == (step.ignored is not None)
    assert step.ready_response is None or isinstance(step.ready_response, ReadyResponse)
    assert step.reply is None or step.reply[0] == frames[0]
    return step.ignored is None


def make_seeds() -> Iterator[bytes]:
    hellos = []
    for kind, (frame, *_) in recordings():
        if kind == "handshake, front end to engine":
            yield join([bytes([_INIT]) + frame])
        elif kind == "handshake, engine to front end":
            hellos.append(_to_front_end(_STATUS, frame))
        elif kind.startswith("first message on each input socket"):
            yield join([_to_front_end(_RESPONSE, frame)])
    yield from (join([hello]) for hello in hellos)
    yield join([_to_front_end(_RESPONSE, b""), *hellos[:7]])


def _to_front_end(receiver: int, payload: bytes) -> bytes:
    return bytes([receiver]) + join([_IDENTITY, payload])


def _made_up() -> st.SearchStrategy[bytes]:
    to_front_end = st.builds(_to_front_end, st.sampled_from([_STATUS, _RESPONSE]), bodies())
    to_engine = bodies().map(lambda body: bytes([_INIT]) + body)
    recorded = st.sampled_from([part for seed in make_seeds() for part in split(seed)])
    return st.lists(to_front_end | to_engine | recorded, min_size=1, max_size=6).map(join)


TARGET = Target("handshake", __doc__, check, st.binary(max_size=300) | _made_up(), make_seeds)
