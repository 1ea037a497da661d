"""A client of a ``MemoryEngine``, played: it keeps the promises' books for what it asks and reads.

Public kit. All methods are to be called inside Trio.
"""

from __future__ import annotations

from collections import Counter
from itertools import count
from typing import TYPE_CHECKING, Any

from trio_engine.outputs import EngineCoreOutput, FinishReason
from trio_engine.requests import EngineCoreRequest
from trio_engine.testing.core_driver import RequestLog
from trio_engine.testing.requests import make_request
from trio_engine.wire.codec import (
    OutputsDecoder,
    RequestDecoder,
    RequestEncoder,
    UndecodableRequest,
    is_engine_core_dead,
)
from trio_engine.wire.messages import UtilityCall

if TYPE_CHECKING:
    from trio_engine.testing.memory_engine import MemoryEngine
    from trio_engine.testing.promises import Promises
    from trio_engine.wire.messages import EngineCoreMessage, Frames


class MemoryClient:
    """One API server, which reads all that comes or nothing.

    Args:
        index: of the client.
        engine: to which it is connected.
        promises: where its requests and what came of them are noted.

    Attributes:
        is_reading: whether ``read`` does anything.
        is_told_dead: whether ENGINE_CORE_DEAD has come.
        unanswered: how many answers are due, by call id.
        strays: what came and should not have, in words, apart from outputs of requests.
    """

    def __init__(self, index: int, engine: MemoryEngine, promises: Promises) -> None:
        self.index = index
        self.is_reading = True
        self.is_told_dead = False
        self.unanswered: Counter[int] = Counter()
        self.strays: list[str] = []
        self._engine = engine
        self._promises = promises
        self._call_ids = count(1)
        self._encoder = RequestEncoder()
        self._decoder = OutputsDecoder()

    def send(self, message: EngineCoreMessage) -> None:
        """Sends a message."""
        frames = [bytes(frame) for frame in self._encoder.encode(message)]
        self._engine.inputs[self.index].send(frames)

    def call(self, method: str, args: list[Any]) -> int:
        """Sends a utility call and returns its id."""
        call_id = next(self._call_ids)
        self.unanswered[call_id] += 1
        self.send(UtilityCall(self.index, call_id, method, args))
        return call_id

    def send_malformed(self, frames: list[bytes]) -> None:
        """Sends what cannot be decoded, and expects an answer where its sender can be read.

        Nothing is sent under the id of an open request that may be over when it arrives.
        """
        error = _decode_error(frames)
        if error.request_id is not None:
            life = self._promises.find(self.index, error.request_id)
            is_late = self._engine.inputs[self.index].is_held_up
            if life is None:
                self._expect_error(error.request_id, str(error))
            elif life.awaits_abort or is_late or not self.is_reading:
                return
        if error.call_id is not None:
            self.unanswered[error.call_id] += 1
        self._engine.inputs[self.index].send(frames)

    @property
    def has_mail(self) -> bool:
        """Whether ``read`` has anything to take."""
        return self.is_reading and self._engine.outputs[self.index].has_mail

    def read(self) -> None:
        """Takes what has come, if it reads."""
        if self.has_mail:
            for frames in self._engine.outputs[self.index].take():
                self._hear(frames)

    def forget_unread(self) -> None:
        """After the engine's end: what it has not read any more was never asked."""
        for frames in self._engine.inputs[self.index].take_unread():
            request_id, call_id = _ids_in(frames)
            life = None if request_id is None else self._promises.find(self.index, request_id)
            if life is not None:
                self._promises.lives.remove(life)
            if call_id is not None:
                self.unanswered[call_id] -= 1

    def _hear(self, frames: Frames) -> None:
        if self.is_told_dead:
            self.strays.append(f"after the death notice came {frames}")
        elif is_engine_core_dead(frames):
            self.is_told_dead = True
        else:
            message = self._decoder.decode(frames)
            self._promises.hear(self.index, message)
            if message.utility_output is not None:
                self._hear_answer(message.utility_output.call_id)

    def _hear_answer(self, call_id: int) -> None:
        if self.unanswered[call_id] <= 0:
            self.strays.append(f"call {call_id} was answered without need")
        self.unanswered[call_id] -= 1

    def _expect_error(self, request_id: str, reason: str) -> None:
        output = EngineCoreOutput(
            request_id, [], finish_reason=FinishReason.ERROR, stop_reason=reason
        )
        solo = RequestLog(finish_reason=FinishReason.ERROR, outputs=[output])
        self._promises.begin(make_request(request_id, [0], client=self.index), solo=solo)


def _ids_in(frames: Frames) -> tuple[str | None, int | None]:
    """Of the request or the call in a message, good or bad."""
    try:
        message = RequestDecoder().decode(frames)
    except UndecodableRequest as error:
        return error.request_id, error.call_id
    request_id = message.request_id if isinstance(message, EngineCoreRequest) else None
    return request_id, message.call_id if isinstance(message, UtilityCall) else None


def _decode_error(frames: list[bytes]) -> UndecodableRequest:
    try:
        message = RequestDecoder().decode(frames)
    except UndecodableRequest as error:
        return error
    raise ValueError(f"this can be decoded: {message}")
