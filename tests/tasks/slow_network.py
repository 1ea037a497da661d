"""Messages that take long to decode, by a mock clock: it stands still otherwise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trio_engine.testing.memory_transport import MemoryNetwork, MemorySocket

if TYPE_CHECKING:
    from trio.testing import MockClock

    from trio_engine.wire.messages import Frames


class SlowFrames(list[bytes | memoryview]):
    """A message that takes so long to decode."""

    def __init__(self, frames: Frames, clock: MockClock, decoding_s: float) -> None:
        super().__init__(bytes(frame) for frame in frames)
        self._clock = clock
        self._decoding_s = decoding_s

    def __getitem__(self, index: Any) -> Any:
        if index == 1:
            self._clock.jump(self._decoding_s)
        return super().__getitem__(index)


class SlowSocket(MemorySocket):
    """Each of its messages takes so long to decode."""

    def __init__(self, network: MemoryNetwork, clock: MockClock, decoding_s: float) -> None:
        super().__init__(network)
        self._clock, self._decoding_s = clock, decoding_s

    async def receive_many(self, limit: int) -> list[Frames]:
        return [self._slow(frames) for frames in await super().receive_many(limit)]

    def receive_nowait(self) -> Frames:
        return self._slow(super().receive_nowait())

    def _slow(self, frames: Frames) -> Frames:
        return SlowFrames(frames, self._clock, self._decoding_s)


class SlowNetwork(MemoryNetwork):
    """A network of such sockets."""

    def __init__(self, clock: MockClock, decoding_s: float) -> None:
        super().__init__()
        self._clock, self._decoding_s = clock, decoding_s

    def socket(self, kind: object, **options: Any) -> MemorySocket:
        return SlowSocket(self, self._clock, self._decoding_s)
