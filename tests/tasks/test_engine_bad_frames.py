"""Frames that no front end should send, beside a stream that must not notice."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from tests.tasks.engine_parts import (
    CONFIG,
    PROMPT,
    check_nothing_held,
    open_engine_beside,
)
from trio_engine.executor.kv_checking import KVCheckingExecutor
from trio_engine.outputs import FinishReason


def add_body(request_id: object, prompt: object = (1, 2)) -> list[object]:
    params = {"temperature": 0.0, "max_tokens": 4}
    return [request_id, prompt, None, params, None, 0.0, None, None, None]


pack = msgspec.msgpack.encode

MAX_MODEL_LEN = 2048

TENSOR = ["float32", [4, 4], 1]
"""A tensor that refers to the first aux frame."""


class BadFrames(NamedTuple):
    """What is sent, and what it deserves beside a log line.

    ``is_refused``: an ERROR output for "bad". ``call_id``: a failure of this call.
    """

    frames: list[bytes]
    is_refused: bool = False
    call_id: int | None = None


def bad_add(*body: object, aux: tuple[bytes, ...] = ()) -> BadFrames:
    return BadFrames([b"\x00", pack(body), *aux], is_refused=True)


def bad_call(call_id: int, *body: object) -> BadFrames:
    return BadFrames([b"\x03", pack(body)], call_id=call_id)


BAD_FRAMES: dict[str, BadFrames] = {
    "no frame": BadFrames([]),
    "one empty frame": BadFrames([b""]),
    "an unknown type": BadFrames([b"\x04", pack([])]),
    "a type of two bytes": BadFrames([b"\x00\x00", pack(add_body("bad"))]),
    "READY from no coordinator": BadFrames([b"READY"]),
    "ADD without a body": BadFrames([b"\x00"]),
    "ADD with an empty body": BadFrames([b"\x00", b""]),
    "ADD cut off": BadFrames([b"\x00", pack(add_body("bad"))[:-9]], is_refused=True),
    "ADD and more": BadFrames([b"\x00", pack(add_body("bad")) + b"\x00"], is_refused=True),
    "ADD whose id is a float": BadFrames([b"\x00", pack(add_body(1.5))]),
    "ADD whose id is nil": BadFrames([b"\x00", pack(add_body(None))]),
    "ADD whose id is bytes": BadFrames([b"\x00", pack(add_body(b"bad"))]),
    "ADD that is a map": BadFrames([b"\x00", pack({"request_id": "bad"})]),
    "ADD too hot": bad_add(*add_body("bad")[:3], {"temperature": 9}, *add_body("bad")[4:]),
    "ADD with a tensor whose frame is absent": bad_add(*add_body("bad"), TENSOR),
    "ADD with a tensor whose frame is short": bad_add(*add_body("bad"), TENSOR, aux=(b"x",)),
    "ADD that never fits": bad_add(*add_body("bad", [1] * MAX_MODEL_LEN)),
    "ADD with an id beyond the vocabulary": bad_add(*add_body("bad", [50_000])),
    "ADD with a negative id": bad_add(*add_body("bad", [-1])),
    "ADD without a prompt": bad_add(*add_body("bad", None)),
    "ADD with an empty prompt": bad_add(*add_body("bad", [])),
    "ADD for no client": BadFrames([b"\x00", pack([*add_body("bad"), None, None, 9])]),
    "ADD under the live id": BadFrames([b"\x00", pack(add_body("healthy"))]),
    "ADD cut off under the live id": BadFrames([b"\x00", pack(add_body("healthy"))[:-9]]),
    "ADD that is a pickle": BadFrames([b"\x00", pack(msgspec.msgpack.Ext(1, b"cposix\nx\n."))]),
    "ABORT of nil": BadFrames([b"\x01", pack(None)]),
    "ABORT of a list in a list": BadFrames([b"\x01", pack([["healthy"]])]),
    "ABORT of a number": BadFrames([b"\x01", pack(1)]),
    "ABORT of somebody unknown": BadFrames([b"\x01", pack("unknown")]),
    "ABORT without a body": BadFrames([b"\x01"]),
    "START_DP_WAVE": BadFrames([b"\x02", pack([1, None])]),
    "START_DP_WAVE of rubbish": BadFrames([b"\x02", pack("x")]),
    "UTILITY with three fields": bad_call(901, 0, 901, "is_sleeping"),
    "UTILITY with five fields": bad_call(902, 0, 902, "is_sleeping", [], 1),
    "UTILITY of a private name": bad_call(903, 0, 903, "_turn", []),
    "UTILITY of what is no method": bad_call(904, 0, 904, "core", []),
    "UTILITY whose arguments are a map": bad_call(905, 0, 905, "is_sleeping", {}),
    "UTILITY for no client": BadFrames([b"\x03", pack([7, 906, "is_sleeping", []])]),
    "UTILITY with a negative id": BadFrames([b"\x03", pack([0, -1, "is_sleeping", []])]),
    "UTILITY that is not UTF-8": BadFrames(
        [b"\x03", b"\x94\x00" + pack(907) + b"\xa2\xff\xff\x90"], call_id=907
    ),
    "nesting without end": BadFrames([b"\x03", b"\x91" * 100_000]),
}


async def test_no_bad_frame_harms_the_stream_beside_it() -> None:
    """Each is dropped or answered, and the stream's tokens are those of its run alone."""
    config = msgspec.structs.replace(CONFIG, max_model_len=MAX_MODEL_LEN, num_blocks=1024)
    async with open_engine_beside(KVCheckingExecutor, config=config) as (front_end, proc):
        await front_end.add("healthy", PROMPT, max_tokens=MAX_MODEL_LEN)
        healthy = front_end.logs[(0, "healthy")]
        for name, bad in BAD_FRAMES.items():
            await front_end.wait_num_tokens("healthy", len(healthy.token_ids) + 1)
            await front_end.call_utility("pause_scheduler", "keep", False)  # or it would be over
            refused = front_end.listen("bad")
            await front_end.send_frames(bad.frames)
            if bad.call_id is not None:
                assert (await front_end.wait_answer(bad.call_id)).failure_message, name
            await front_end.call_utility("resume_scheduler")
            reason = FinishReason.ERROR if bad.is_refused else None
            assert refused.finish_reason is reason, name
            assert healthy.finish_reason is None, name
        await front_end.abort("healthy")
        await front_end.call_utility("is_sleeping")
        check_nothing_held(proc)
    async with open_engine_beside(KVCheckingExecutor, config=config) as (front_end, _):
        await front_end.add("alone", PROMPT, max_tokens=len(healthy.token_ids))
        assert (await front_end.finish("alone")).token_ids == healthy.token_ids
