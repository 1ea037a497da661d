"""Frames that no front end should send: broken messages, aborts of nobody, calls that must fail."""

from __future__ import annotations

import math
import pickle
from typing import Any

import msgspec

from tests.tasks.bad_messages import (
    BAD_ID,
    CALL_ID,
    LIVE_ID,
    MAX_MODEL_LEN,
    BadMessage,
    Reaction,
    Table,
    add,
    add_edited,
    body_of,
    call,
    pack,
    raw,
)

DROPPED, REFUSED, FAILED = Reaction.DROPPED, Reaction.REFUSED, Reaction.FAILED
IGNORED, SERVED = Reaction.IGNORED, Reaction.SERVED

PICKLE = msgspec.msgpack.Ext(1, pickle.dumps(print))
CLOUDPICKLE = msgspec.msgpack.Ext(2, b"x")
NESTED = b"\x91" * 100_000
"""An array in an array in an array: deeper than any decoder goes."""
MEGABYTE = "x" * (1 << 20)


def tensor(
    reaction: Reaction, reason: str, dtype: Any, shape: Any, data: Any, *aux: bytes
) -> BadMessage:
    """An ADD with embeddings that are spelled so."""
    return add(reaction, reason, *aux, prompt_embeds=[dtype, shape, data])


def inline(data: bytes) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(3, data)


NO_MESSAGE: Table = {
    "no frame, which ZeroMQ sends to nobody": raw(IGNORED),
    "one empty frame": raw(DROPPED, b"", reason="unknown request type"),
    "type 04, vLLM's own": raw(DROPPED, b"\x04", pack([]), reason="unknown request type"),
    "type ff": raw(DROPPED, b"\xff", pack([BAD_ID]), reason="unknown request type"),
    "a type of two bytes": raw(DROPPED, b"\x00\x00", pack(body_of(0)), reason="unknown request"),
    "a type of a megabyte": raw(DROPPED, bytes(1 << 20), reason="unknown request type"),
    "READY from no coordinator": raw(DROPPED, b"READY", reason="unknown request type"),
    "START_DP_WAVE from no coordinator": raw(DROPPED, b"\x02", pack([1, None]), reason="StartDP"),
    "START_DP_WAVE of rubbish": raw(DROPPED, b"\x02", pack("x"), reason="START_DP_WAVE"),
}

BROKEN_ADDS: Table = {
    "ADD without a body": raw(DROPPED, b"\x00", reason="ADD without a body"),
    "ADD with an empty body": raw(DROPPED, b"\x00", b"", reason="cannot decode ADD"),
    "ADD of nil": raw(DROPPED, b"\x00", pack(None), reason="cannot decode ADD"),
    "ADD that is a map": raw(DROPPED, b"\x00", pack({"request_id": BAD_ID}), reason="decode ADD"),
    "ADD that is a pickle": raw(DROPPED, b"\x00", pack(PICKLE), reason="cannot decode ADD"),
    "ADD that claims 2**32 fields": raw(DROPPED, b"\x00", b"\xdd" + b"\xff" * 4, reason="ADD"),
    "ADD nested without end": raw(DROPPED, b"\x00", NESTED, reason="cannot decode ADD"),
    "ADD whose id claims 4 GiB": raw(DROPPED, b"\x00", b"\x9f\xdb" + b"\xff" * 4, reason="ADD"),
    "ADD cut off": add_edited(REFUSED, lambda body: body[:-9], "truncated"),
    "ADD cut off in its id": add_edited(DROPPED, lambda body: body[:4], "truncated"),
    "ADD and more": add_edited(REFUSED, lambda body: body + b"\x00", "trailing"),
    "ADD of eight fields": add_edited(
        REFUSED, lambda body: pack(msgspec.msgpack.decode(body)[:8]), "length"
    ),
    "ADD with a text that is not UTF-8": add_edited(
        REFUSED, lambda body: body.replace(b"salt", b"s\xff\xfft"), "UTF-8", cache_salt="salt"
    ),
    "ADD with a field nested without end": add_edited(
        REFUSED, lambda body: body.replace(b"\xa4here", NESTED + b"\xc0"), mm_features="here"
    ),
    "ADD whose id is not UTF-8": add_edited(
        DROPPED, lambda body: body.replace(b"bad", b"b\xffd"), "UTF-8"
    ),
    "ADD whose id is a float": add(DROPPED, "$[0]", request_id=1.5),
    "ADD whose id is nil": add(DROPPED, "$[0]", request_id=None),
    "ADD whose id is bytes": add(DROPPED, "$[0]", request_id=b"bad"),
    "ADD whose id is an array": add(DROPPED, "$[0]", request_id=[BAD_ID]),
    "ADD for no client": add(DROPPED, "no such client", client_index=9),
    "ADD for client -1": add(DROPPED, "no such client", client_index=-1),
    "ADD for client 2**64 - 1": add(DROPPED, "no such client", client_index=2**64 - 1),
    "ADD under the live id": add(DROPPED, "id is live", request_id=LIVE_ID),
    "ADD cut off under the live id": add_edited(
        DROPPED, lambda body: body[:-9], "truncated", request_id=LIVE_ID
    ),
    "ADD too long under the live id": add(
        DROPPED, "id is live", request_id=LIVE_ID, prompt_token_ids=[1] * MAX_MODEL_LEN
    ),
    "ADD under the live id, aborted at once": add(
        DROPPED, "id is live", request_id=LIVE_ID, abort_immediately=True
    ),
    "ADD with frames that nobody refers to": add(SERVED, "", *[b"x"] * 1000),
}

BAD_TENSORS: Table = {
    "a tensor whose frame is absent": tensor(REFUSED, "absent", "float32", [4, 4], 1),
    "a tensor in frame 0": tensor(REFUSED, "absent", "float32", [4, 4], 0, bytes(64)),
    "a tensor whose frame is short": tensor(REFUSED, "64 bytes", "float32", [4, 4], 1, b"x"),
    "a tensor whose frame is long": tensor(REFUSED, "4 bytes", "float32", [1, 1], 1, bytes(9)),
    "a tensor of a negative size": tensor(REFUSED, "-4", "float32", [-4, -4], inline(b"")),
    "a tensor of 2**80 bytes": tensor(REFUSED, "absurd", "int8", [2**40] * 2, 1, b"x"),
    "an empty tensor of absurd sizes": tensor(
        REFUSED, "absurd", "int8", [0, 2**40, 2**40], inline(b"")
    ),
    "a tensor of 4,000 dimensions": tensor(
        REFUSED, "4000 dimensions", "int8", [1] * 4000, inline(b"x")
    ),
    "a tensor of no dtype": tensor(REFUSED, "float8", "float8", [1], inline(b"x")),
    "a tensor whose dtype is a megabyte": tensor(REFUSED, "xxx", MEGABYTE, [1], inline(b"x")),
    "a tensor in shared memory": tensor(REFUSED, "shared", "float32", [1], {"tensor_id": 0}),
    "a tensor that is a pickle": tensor(REFUSED, "pickle", "float32", [1], PICKLE),
}

ABORTS: Table = {
    "ABORT without a body": raw(DROPPED, b"\x01", reason="ABORT without a body"),
    "ABORT of nil": raw(DROPPED, b"\x01", pack(None), reason="cannot decode ABORT"),
    "ABORT of a number": raw(DROPPED, b"\x01", pack(1), reason="cannot decode ABORT"),
    "ABORT of a number in lists": raw(DROPPED, b"\x01", pack([[1]]), reason="decode ABORT"),
    "ABORT of the live id in lists": raw(DROPPED, b"\x01", pack([[LIVE_ID]]), reason="ABORT"),
    "ABORT of the live id and a number": raw(DROPPED, b"\x01", pack([LIVE_ID, 1]), reason="ABORT"),
    "ABORT of the live id, cut off": raw(DROPPED, b"\x01", pack([LIVE_ID])[:-1], reason="ABORT"),
    "ABORT of nobody": raw(IGNORED, b"\x01", pack([])),
    "ABORT of a bare string": raw(IGNORED, b"\x01", pack("unknown")),
    "ABORT of 100,000 unknown ids": raw(IGNORED, b"\x01", pack(list(map(str, range(100_000))))),
    "ABORT and a frame": raw(IGNORED, b"\x01", pack(["unknown"]), b"x"),
}

BAD_CALLS: Table = {
    "UTILITY without a body": raw(DROPPED, b"\x03", reason="UTILITY without a body"),
    "UTILITY with three fields": BadMessage(
        lambda client: [b"\x03", pack([client, CALL_ID, "is_sleeping"])], FAILED, "length"
    ),
    "UTILITY with five fields": call("is_sleeping", [], 1, reason="length"),
    "UTILITY with a nil id": raw(DROPPED, b"\x03", pack([0, None, "sleep", []]), reason="$[1]"),
    "UTILITY with a negative id": raw(DROPPED, b"\x03", pack([0, -1, "sleep", []]), reason="$[1]"),
    "UTILITY for no client": raw(DROPPED, b"\x03", pack([7, CALL_ID, "sleep", []]), reason="drop"),
    "UTILITY of a private name": call("_turn", [], reason="no such method"),
    "UTILITY of a special name": call("__init__", [], reason="no such method"),
    "UTILITY of what is no method": call("core", [], reason="no such method"),
    "UTILITY of a megabyte": call(MEGABYTE, [], reason="no such method"),
    "UTILITY of a number": call(1, [], reason="$[2]"),
    "UTILITY whose arguments are a map": call("is_sleeping", {}, reason="$[3]"),
    "UTILITY whose arguments are nil": call("is_sleeping", None, reason="$[3]"),
    "UTILITY with a pickled argument": call("is_sleeping", [PICKLE], reason="pickle"),
    "UTILITY with a cloudpickled argument": call("is_sleeping", [CLOUDPICKLE], reason="pickle"),
    "UTILITY nested without end": BadMessage(
        lambda client: [b"\x03", b"\x94" + pack(client) + pack(CALL_ID) + b"\xa1x" + NESTED], FAILED
    ),
    "UTILITY that is not UTF-8": BadMessage(
        lambda client: [b"\x03", b"\x94" + pack(client) + pack(CALL_ID) + b"\xa2\xff\xff\x90"],
        FAILED,
        "UTF-8",
    ),
    "too many arguments": call("is_sleeping", [1], reason="at most 0 arguments"),
    "too few arguments": call("collective_rpc", [], reason="'method'"),
    "a pause of no mode": call("pause_scheduler", ["soon"], reason="soon"),
    "a pause of mode 0": call("pause_scheduler", [0], reason="str"),
    "a sleep of level 9": call("sleep", [9], reason="9"),
    "a sleep of level 1.5": call("sleep", [1.5], reason="int"),
    "a wake-up of what cannot sleep": call("wake_up", [["cat"]], reason="cat"),
    "a resume with an argument": call("resume_scheduler", [True], reason="at most 0"),
    "a command that the executor lacks": call("collective_rpc", ["destroy"], reason="destroy"),
    "a command that is a method": call("collective_rpc", ["sleep", None, [[]]], reason="sleep"),
    "a command within NaN seconds": call("collective_rpc", ["x", math.nan], reason="nan"),
    "a command within -1 seconds": call("collective_rpc", ["x", -1.0], reason="-1"),
    "a command with keywords": call("collective_rpc", ["x", None, [], {"a": 1}], reason="kwargs"),
    "a command with a megabyte": call(
        "collective_rpc", ["x", None, [], {"a": MEGABYTE}], reason="kwargs"
    ),
    "an adapter": call("add_lora", [["a", 1, "/"]], reason="adapters"),
    "an adapter without id": call("add_lora", [["a"]], reason="length"),
    "a profile": call("profile", [True], reason="profiler"),
}

BAD_FRAMES: Table = {**NO_MESSAGE, **BROKEN_ADDS, **BAD_TENSORS, **ABORTS, **BAD_CALLS}
