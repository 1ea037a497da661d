"""What a row of bad messages is: frames, and the reaction that they deserve.

An engine for them has ``CONFIG``'s limits and ``VOCAB_SIZE``. The rows are in ``bad_frames.py`` and
``bad_requests.py``, and ``test_bad_messages.py`` sends each beside streams that must not notice.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from trio_engine.config import EngineConfig
from trio_engine.requests import EngineCoreRequest

VOCAB_SIZE = 257
"""Bytes and an end, which is what an executor without a model has grammars over."""
MAX_MODEL_LEN = 256
CONFIG = EngineConfig(
    executor="kv-checking",
    max_model_len=MAX_MODEL_LEN,
    block_size=4,
    num_blocks=256,
    max_num_seqs=4,
    max_num_batched_tokens=MAX_MODEL_LEN,
    handshake_timeout_s=10.0,
)

BAD_ID = "bad"
LIVE_ID = "healthy"
"""The id of a stream that the sender has running."""
CALL_ID = 901


class Reaction(enum.Enum):
    """What the sender hears."""

    DROPPED = "nothing; the log has a line"
    REFUSED = "an ERROR output for the request, at once"
    REFUSED_LATER = "an ERROR output for the request, when its grammar was looked at"
    FAILED = "a failure of the call"
    IGNORED = "nothing"
    SERVED = "the request runs to its end"
    ANSWERED = "the request is refused or served: not every engine can serve it"


class BadMessage(NamedTuple):
    """``frames`` by the sender's client index, the reaction, and a part of the reason given."""

    frames: Callable[[int], list[bytes]]
    reaction: Reaction
    reason: str = ""
    request_id: str = BAD_ID

    @property
    def is_answered(self) -> bool:
        """Whether there is an output for its request."""
        return self.reaction not in (Reaction.DROPPED, Reaction.FAILED, Reaction.IGNORED)


Table = dict[str, BadMessage]

pack = msgspec.msgpack.encode


def body_of(client: int, **changes: Any) -> list[Any]:
    """All fields of a good request of ``BAD_ID``, changed at some places."""
    good: dict[str, Any] = {
        field.encode_name: None for field in msgspec.structs.fields(EngineCoreRequest)
    }
    good |= {"request_id": BAD_ID, "prompt_token_ids": [5, 6], "arrival_time": 0.5}
    good |= {"sampling_params": {"temperature": 0.0, "max_tokens": 4}, "client_index": client}
    good |= {"current_wave": 0, "priority": 0, "resumable": False, "abort_immediately": False}
    return list((good | changes).values())


def raw(reaction: Reaction, *frames: bytes, reason: str = "") -> BadMessage:
    """Frames that are the same for every sender."""
    return BadMessage(lambda _client: list(frames), reaction, reason)


def add(reaction: Reaction, reason: str = "", *aux: bytes, **fields: Any) -> BadMessage:
    """An ADD with these values in the fields of its request."""
    request_id = fields.get("request_id")
    return BadMessage(
        lambda client: [b"\x00", pack(body_of(client, **fields)), *aux],
        reaction,
        reason,
        request_id if isinstance(request_id, str) else BAD_ID,
    )


def add_edited(
    reaction: Reaction, edit: Callable[[bytes], bytes], reason: str = "", **fields: Any
) -> BadMessage:
    """An ADD whose packed body was edited."""
    return BadMessage(
        lambda client: [b"\x00", edit(pack(body_of(client, **fields)))], reaction, reason
    )


def params(reaction: Reaction, reason: str = "", /, **changes: Any) -> BadMessage:
    """An ADD with these sampling parameters."""
    good = {"temperature": 0.0, "max_tokens": 4}
    return add(reaction, reason, sampling_params=good | changes)


def call(method: Any, args: Any, *more: Any, reason: str) -> BadMessage:
    """A UTILITY that fails."""
    return BadMessage(
        lambda client: [b"\x03", pack([client, CALL_ID, method, args, *more])],
        Reaction.FAILED,
        reason,
    )
