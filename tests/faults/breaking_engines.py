"""Commands of engines that break: by themselves while they start, or when a test tells them to.

Each prints ``REACHED`` when it has come so far. The real engine with an executor without a model
where that can be; a stand-in on the testing kit where it has to say what an engine never says.
"""

from __future__ import annotations

import signal

from tests.faults.matrix import Means, Moment
from tests.process.engine_programs import scripted_command
from tests.process.stand_ins import command_of, wire_command_of

REACHED = "as far as told"
EXIT_STATUS = 3
STEP_S = 0.2
"""Of an engine whose steps are long."""
NUM_TOKENS_BEFORE_SILENCE = 3

# What the process does to itself; on any thread.
_ACTIONS = {
    Means.CLOSE: f"os._exit({EXIT_STATUS})",
    Means.KILL: "os.kill(os.getpid(), signal.SIGKILL)",
    Means.STOP: "os.kill(os.getpid(), signal.SIGSTOP)",
    Means.SILENCE: "time.sleep(600)",
}


def breaks_at_start(moment: Moment, means: Means) -> list[str]:
    """An engine that breaks at a moment of its start."""
    if means is Means.MALFORMED:
        return _MALFORMED_AT_START[moment]
    action = f"print({REACHED!r}, flush=True); {_ACTIONS[means]}"
    if moment is Moment.BEFORE_HELLO:
        return command_of(f"import os, signal, time; {action}")
    if moment is Moment.BEFORE_READY:
        return wire_command_of(_AFTER_HELLO.format(action=f"import time; {action}"))
    assert moment is Moment.LOADING
    return scripted_command(executor=f"def load(self): {action}")


_AFTER_HELLO = """
async def main():
    async with open_context() as context:
        handshake = EngineHandshake(0, local=True, headless=False)
        socket = context.socket(SocketKind.DEALER, identity=handshake.identity, linger_s=1.0)
        socket.connect(address)
        await socket.send([handshake.hello()])
        addresses = handshake.receive_init(await socket.receive())
        {action}
        await trio.sleep_forever()

trio.run(main)
"""

_SAY_REACHED = f"print({REACHED!r}, flush=True)"

_MALFORMED_AT_START = {
    Moment.BEFORE_HELLO: wire_command_of(
        f"""
        async def main():
            async with open_context() as context:
                socket = context.socket(SocketKind.DEALER, identity=bytes(2), linger_s=1.0)
                socket.connect(address)
                {_SAY_REACHED}
                await socket.send([b"garbage"])
                await trio.sleep_forever()

        trio.run(main)
        """
    ),
    Moment.BEFORE_READY: wire_command_of(
        _AFTER_HELLO.format(action=f"{_SAY_REACHED}; await socket.send([b'garbage'])")
    ),
    Moment.LOADING: wire_command_of(
        _AFTER_HELLO.format(
            action="""
        inbound = context.socket(SocketKind.DEALER, identity=handshake.identity, linger_s=1.0)
        inbound.connect(addresses.inputs[0])
        """
            + f"{_SAY_REACHED}"
            + """
        await inbound.send([b"garbage"])
        await socket.send([handshake.ready()])
        """
        )
    ),
}

CLOSE_SIGNAL = signal.SIGUSR1
"""By which a test has an engine of ``serves`` end by itself, at any moment."""

_ENDS_AT_A_SIGNAL = f"signal.signal(signal.{CLOSE_SIGNAL.name}, lambda *_: os._exit({EXIT_STATUS}))"

_FALLS_SILENT = f"""
num_steps = 0

def collect(self):
    self.num_steps += 1
    if self.num_steps > {NUM_TOKENS_BEFORE_SILENCE}:
        {_SAY_REACHED}
        time.sleep(600)
    return super().collect()
"""


def serves(moment: Moment) -> list[str]:
    """An engine in good order; its steps are long if the moment is in one."""
    step_ms = 1000 * STEP_S if moment is Moment.MID_STEP else 2
    timeout_s = 60 if moment is Moment.DRAINING else 0
    return scripted_command(
        f"--null-step-ms={step_ms}",
        f"--shutdown-timeout={timeout_s}",
        executor=_ENDS_AT_A_SIGNAL,
    )


FALLS_SILENT = scripted_command(executor=f"{_ENDS_AT_A_SIGNAL}\n{_FALLS_SILENT}")
"""A step after a few tokens never returns."""

GARBLES = wire_command_of(
    """
    # Between any two good messages there is one that means nothing.
    GARBAGE = [[b""], [b"\\xc1"], [b"garbage"], [b"\\x90", b"aux"], [bytes(1 << 20)]]

    async def main():
        async with open_scripted_engine(address, local=True, headless=False) as wire:
            with trio.open_signal_receiver(signal.SIGTERM) as signals:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(serve, wire)
                    async for _ in signals:
                        nursery.cancel_scope.cancel()

    async def garble(wire):
        for frames in GARBAGE:
            await wire.send_frames(frames)

    async def serve(wire):
        while True:
            await garble(wire)
            message = await wire.receive()
            if isinstance(message, EngineCoreRequest):
                for token_id in range(5):
                    await garble(wire)
                    last = FinishReason.LENGTH if token_id == 4 else None
                    await wire.send_tokens(message.request_id, [token_id], last)
            elif isinstance(message, UtilityCall):
                await garble(wire)
                await wire.answer(message, "answer")

    trio.run(main)
    """
)
GARBLED_TOKENS = list(range(5))
"""What a request to ``GARBLES`` gets."""
