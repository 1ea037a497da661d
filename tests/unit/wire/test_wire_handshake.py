"""Both sides of the start-up, against each other and against misbehaving peers."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from trio_engine.errors import ConfigError, ProtocolError
from trio_engine.wire.codec import decode_control, encode_control
from trio_engine.wire.handshake import (
    EngineHandshake,
    ExpectedEngine,
    FrontEndHandshake,
    engine_identity,
)
from trio_engine.wire.messages import (
    EngineStatus,
    EngineZmqAddresses,
    Init,
    ReadyResponse,
    StatusMessage,
)

ADDRESSES = EngineZmqAddresses(inputs=["ipc:///in"], outputs=["ipc:///out"])
RESPONSE = ReadyResponse(
    max_model_len=2048,
    num_gpu_blocks=100,
    block_size=16,
    dp_stats_address=None,
    dtype="float32",
    vllm_version="0.25.1",
    world_size=1,
    data_parallel_size=1,
)


def front_end(*indexes: int, local: bool = True, headless: bool | None = None) -> FrontEndHandshake:
    expected = [ExpectedEngine(index, local, headless) for index in indexes or (0,)]
    return FrontEndHandshake(ADDRESSES, expected, parallel_config={"data_parallel_size": 2})


def engine(index: int = 0, **changes: Any) -> EngineHandshake:
    return EngineHandshake(index, **({"local": True, "headless": False} | changes))


def status(word: str, *, local: bool = True, headless: bool = False) -> bytes:
    return encode_control(StatusMessage(status=EngineStatus(word), local=local, headless=headless))


def test_two_engines_start_up() -> None:
    front = front_end(0, 300)
    for number, index in enumerate((300, 0)):
        side = engine(index)
        step = front.receive([side.identity, side.hello()])
        assert step.reply is not None
        assert step.reply[0] == side.identity
        assert side.receive_init(step.reply[1:]) == ADDRESSES
        assert side.parallel_config == {"data_parallel_size": 2}
        announced = front.receive_ready_response([side.identity, side.ready_response(RESPONSE)])
        assert (announced.engine_index, announced.ready_response) == (index, RESPONSE)
        assert not front.is_complete
        assert front.receive([side.identity, side.ready()]).reply is None
        assert front.is_complete == (number == 1)
    assert front.ready_responses == {0: RESPONSE, 300: RESPONSE}
    assert front.missing() == []


def test_ready_and_ready_response_come_in_any_order() -> None:
    front, side = front_end(), engine()
    (_, init) = front.receive([side.identity, side.hello()]).reply or []
    side.receive_init([init])
    front.receive([side.identity, side.ready()])
    assert front.missing() == ["engine 0: ready response"]
    front.receive_ready_response([side.identity, side.ready_response(RESPONSE)])
    assert front.is_complete


def test_missing_names_engine_and_message() -> None:
    front = front_end(0, 1)
    front.receive([b"\x00\x00", status("HELLO")])
    assert front.missing() == [
        "engine 0: READY",
        "engine 0: ready response",
        "engine 1: HELLO",
        "engine 1: READY",
        "engine 1: ready response",
    ]


def test_empty_ready_response_is_accepted() -> None:
    front = front_end()
    assert front.receive_ready_response([b"\x00\x00", b""]).ready_response is None
    assert front.ready_responses == {0: None}


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"\x01\x00", status("HELLO")],
        [b"\x00\x00\x00", status("HELLO")],
        [b"\x00abcd", b"GET / HTTP/1.1"],
        [b"\x00abcd"],
        [b"\x00abcd", b"", b"x"],
    ],
)
def test_stranger_does_not_end_the_start_up(frames: list[bytes]) -> None:
    front = front_end()
    for receive in (front.receive, front.receive_ready_response):
        step = receive(frames)
        assert (step.engine_index, step.reply) == (None, None)
        assert step.ignored is not None
        assert "unexpected identity" in step.ignored
    assert front.receive([b"\x00\x00", status("HELLO")]).reply is not None


@pytest.mark.parametrize("words", list(itertools.product(["HELLO", "READY"], repeat=3)))
def test_hello_and_ready_out_of_turn_end_the_start_up(words: tuple[str, ...]) -> None:
    """Of three messages at least one is out of turn; those before it are accepted."""
    front = front_end()
    accepted = list(
        itertools.takewhile(
            lambda pair: pair[0] == pair[1], zip(words, ["HELLO", "READY"], strict=False)
        )
    )
    for word, _ in accepted:
        front.receive([b"\x00\x00", status(word)])
    with pytest.raises(ProtocolError, match="out of turn"):
        front.receive([b"\x00\x00", status(words[len(accepted)])])


@pytest.mark.parametrize(
    ("expected", "said", "message"),
    [
        (
            ExpectedEngine(0, local=True),
            {"local": False},
            r"engine 0 says local=False, expected local=True \(with --headless an engine says ",
        ),
        (
            ExpectedEngine(0, local=False),
            {"local": True},
            r"engine 0 says local=True, expected local=False \(",
        ),
        (
            ExpectedEngine(0, local=False, headless=True),
            {"local": False, "headless": False},
            "says local=False headless=False, expected local=False headless=True ",
        ),
        (
            ExpectedEngine(0, local=False, headless=False),
            {"local": False, "headless": True},
            "says local=False headless=True, expected local=False headless=False ",
        ),
    ],
)
def test_engine_of_another_kind_ends_the_start_up(
    expected: ExpectedEngine, said: dict[str, bool], message: str
) -> None:
    front = FrontEndHandshake(ADDRESSES, [expected])
    with pytest.raises(ProtocolError, match=message):
        front.receive([b"\x00\x00", status("HELLO", **said)])


def test_headless_is_not_looked_at_where_nothing_is_expected() -> None:
    for headless in (True, False):
        front_end().receive([b"\x00\x00", status("HELLO", headless=headless)])


@pytest.mark.parametrize("payload", [[], [b""], [b"junk"], [b"\x80"], [status("HELLO"), b""]])
def test_garbage_from_an_expected_engine_ends_the_start_up(payload: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        front_end().receive([b"\x00\x00", *payload])


@pytest.mark.parametrize("payload", [[], [b"junk"], [b"\x80"], [b"", b""]])
def test_garbage_for_a_ready_response_ends_the_start_up(payload: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        front_end().receive_ready_response([b"\x00\x00", *payload])


def test_missing_key_in_a_ready_response_is_named() -> None:
    partial = {key: value for key, value in msgspec.to_builtins(RESPONSE).items() if key != "dtype"}
    with pytest.raises(ProtocolError, match="dtype"):
        front_end().receive_ready_response([b"\x00\x00", encode_control(partial)])


def test_second_ready_response_ends_the_start_up() -> None:
    front = front_end(0, 1)
    front.receive_ready_response([b"\x00\x00", encode_control(RESPONSE)])
    with pytest.raises(ProtocolError, match="second"):
        front.receive_ready_response([b"\x00\x00", encode_control(RESPONSE)])


@pytest.mark.parametrize(
    ("hashes", "agree"), [(("a", "a"), True), (("a", "b"), False), (("a", None), False)]
)
def test_ranks_must_agree_on_their_parallel_config(
    hashes: tuple[str | None, ...], agree: bool
) -> None:
    front = front_end(0, 1)
    sides = [engine(index, parallel_config_hash=text) for index, text in enumerate(hashes)]
    for side in sides:
        (_, init) = front.receive([side.identity, side.hello()]).reply or []
        side.receive_init([init])
    front.receive([sides[0].identity, sides[0].ready()])
    if agree:
        front.receive([sides[1].identity, sides[1].ready()])
    else:
        with pytest.raises(ProtocolError, match="engine 1 differs from engine 0"):
            front.receive([sides[1].identity, sides[1].ready()])


def test_engine_says_what_it_is() -> None:
    side = engine(1, local=False, headless=True, parallel_config_hash="h")
    assert side.identity == b"\x01\x00"
    assert decode_control(side.hello(), dict) == {
        "status": "HELLO",
        "local": False,
        "headless": True,
    }
    side.receive_init([encode_control(Init(addresses=ADDRESSES))])
    assert decode_control(side.ready(), dict) == {
        "status": "READY",
        "local": False,
        "headless": True,
        "parallel_config_hash": "h",
    }


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"junk"],
        [b"\x80"],
        [encode_control(Init(addresses=ADDRESSES)), b""],
        [encode_control(Init(addresses=EngineZmqAddresses(inputs=["a"], outputs=[])))],
    ],
)
def test_bad_init_is_refused(frames: list[bytes]) -> None:
    side = engine()
    with pytest.raises(ProtocolError):
        side.receive_init(frames)
    assert side.addresses is None


def test_second_init_is_refused() -> None:
    side = engine()
    init = encode_control(Init(addresses=ADDRESSES))
    side.receive_init([init])
    with pytest.raises(ProtocolError, match="second INIT"):
        side.receive_init([init])


def test_engine_cannot_be_ready_before_init() -> None:
    side = engine()
    with pytest.raises(RuntimeError):
        side.ready()
    with pytest.raises(RuntimeError):
        side.ready_response(RESPONSE)


@pytest.mark.parametrize("index", [-1, 65536])
def test_index_must_fit_its_identity(index: int) -> None:
    with pytest.raises(ConfigError):
        engine_identity(index)


frames_of_anyone = st.tuples(
    st.sampled_from([b"\x00\x00", b"\x01\x00", b"\x00abcd"]),
    st.one_of(
        st.binary(max_size=40),
        st.sampled_from([status("HELLO"), status("READY"), encode_control(RESPONSE)]),
    ),
)


@given(st.lists(st.tuples(st.booleans(), frames_of_anyone), max_size=12))
@settings(deadline=None)
def test_front_end_is_complete_only_after_every_message(
    received: list[tuple[bool, tuple[bytes, bytes]]],
) -> None:
    front = front_end(0, 1)
    accepted = []
    for at_input, frames in received:
        try:
            step = (front.receive_ready_response if at_input else front.receive)(list(frames))
        except ProtocolError:
            continue
        if step.ignored is None:
            accepted.append(frames)
    assert front.is_complete == (len(accepted) == 6)
