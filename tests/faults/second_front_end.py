"""The second of two front ends of an engine, in a process of its own.

``python -m tests.faults.second_front_end MOMENT MEANS``. Its addresses, which it says on standard
output, are for the INIT of the first one.
"""

from __future__ import annotations

import signal
import sys

import trio

from tests.faults.breaking_engines import CLOSE_SIGNAL, REACHED
from tests.faults.client_process import PROMPT, TOKENS_ARE_RIGHT, say
from tests.faults.matrix import Means, Moment
from tests.tasks.bad_frames import BAD_FRAMES
from trio_engine.executor.null import null_token
from trio_engine.testing.requests import make_request
from trio_engine.testing.wire_front_end import WireFrontEnd
from trio_engine.wire.messages import UtilityCall

ADDRESSES = "addresses "
GO_SIGNAL = signal.SIGUSR2
"""By which a test has it begin."""
CLIENT = 1
"""What the engine knows it as."""


def num_tokens(moment: Moment, means: Means) -> int:
    """Of its stream: a second or two, and without end if it reads no more."""
    if means is Means.SILENCE:
        return 100_000
    return 10 if moment is Moment.MID_STEP else 500


async def play(moment: Moment, means: Means, front_end: WireFrontEnd, may_go: trio.Event) -> None:
    await front_end.receive_announcement()
    await may_go.wait()
    count = num_tokens(moment, means)
    if moment is not Moment.IDLE:
        log = front_end.listen("theirs")
        await front_end.send(make_request("theirs", PROMPT, client=CLIENT, max_tokens=count))
        await front_end.wait_num_tokens("theirs", 1)
    if moment is Moment.CALL_PENDING:
        await front_end.send(UtilityCall(CLIENT, 2, "pause_scheduler", ["wait"]))
    await front_end.send(UtilityCall(CLIENT, 1, "is_sleeping", []))
    await front_end.wait_answer(1)
    if means is Means.MALFORMED:
        for message in BAD_FRAMES.values():
            await front_end.send_frames(message.frames(CLIENT))
    say(REACHED)
    if moment is Moment.IDLE or means in (Means.SILENCE, Means.MALFORMED):
        await trio.sleep_forever()
    await front_end.finish("theirs")
    if log.token_ids == [null_token(PROMPT, place) for place in range(count)]:
        say(TOKENS_ARE_RIGHT)
    await trio.sleep_forever()


async def main(moment: Moment, means: Means) -> None:
    may_go = trio.Event()
    with trio.open_signal_receiver(CLOSE_SIGNAL, GO_SIGNAL) as signals:
        async with WireFrontEnd() as front_end, trio.open_nursery() as nursery:
            say(ADDRESSES + " ".join(front_end.addresses.inputs + front_end.addresses.outputs))
            nursery.start_soon(play, moment, means, front_end, may_go)
            async for number in signals:
                if number == GO_SIGNAL:
                    may_go.set()
                else:
                    nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main, Moment[sys.argv[1]], Means[sys.argv[2]])
