"""Small programs in the engine's place: each has one fault, or none.

They are given as ``command`` to ``open_engine``, which appends the engine's flags.
"""

from __future__ import annotations

import sys
import textwrap

_PRELUDE = """
import os, signal, subprocess, sys
import trio
from trio_engine.outputs import FinishReason
from trio_engine.requests import EngineCoreRequest
from trio_engine.testing.wire_engine import open_scripted_engine
from trio_engine.transport.context import open_context
from trio_engine.transport.socket import SocketKind
from trio_engine.wire.handshake import EngineHandshake
from trio_engine.wire.messages import UtilityCall

address = sys.argv[sys.argv.index("--handshake-address") + 1]
"""


def command_of(program: str) -> list[str]:
    """A command that runs a program which needs nothing."""
    return [sys.executable, "-c", textwrap.dedent(program)]


def wire_command_of(program: str) -> list[str]:
    """A command that runs a program on the kit, with ``address`` of the front end set."""
    return [sys.executable, "-c", _PRELUDE + textwrap.dedent(program)]


def exits(status: int) -> list[str]:
    """Ends before HELLO."""
    return command_of(
        f"import sys; print('no such model', file=sys.stderr, flush=True); sys.exit({status})"
    )


NEVER_SAYS_HELLO = command_of("import time; time.sleep(600)")


def exits_after_hello(status: int) -> list[str]:
    """Ends once it was told its addresses."""
    return wire_command_of(
        f"""
        async def main():
            async with open_context() as context:
                handshake = EngineHandshake(0, local=True, headless=False)
                socket = context.socket(SocketKind.DEALER, identity=handshake.identity)
                socket.connect(address)
                await socket.send([handshake.hello()])
                handshake.receive_init(await socket.receive())

        trio.run(main)
        print("no such model", flush=True)
        os._exit({status})
        """
    )


def exits_after_ready(status: int) -> list[str]:
    """Ends at the first message, so that its client surely knows that it was ready."""
    return wire_command_of(
        f"""
        async def main():
            async with open_scripted_engine(address, local=True, headless=False) as wire:
                await wire.receive()

        trio.run(main)
        os._exit({status})
        """
    )


STREAMS = wire_command_of(
    """
    # Answers every request with tokens without end, and the utility "getpid".
    async def stream(wire, request_id):
        while True:
            await wire.send_tokens(request_id, [7])
            await trio.sleep(0.002)

    async def main():
        async with open_scripted_engine(address, local=True, headless=False) as wire:
            async with trio.open_nursery() as nursery:
                with trio.open_signal_receiver(signal.SIGTERM) as signals:
                    nursery.start_soon(answer, wire, nursery)
                    async for _ in signals:
                        print("asked to stop", flush=True)
                        nursery.cancel_scope.cancel()

    async def answer(wire, nursery):
        while True:
            message = await wire.receive()
            if isinstance(message, EngineCoreRequest):
                nursery.start_soon(stream, wire, message.request_id)
            elif isinstance(message, UtilityCall) and message.method == "getpid":
                await wire.answer(message, os.getpid())

    print("a line on stdout", flush=True)
    print("a line on stderr", file=sys.stderr, flush=True)
    trio.run(main)
    """
)

IGNORES_SIGTERM = wire_command_of(
    """
    signal.signal(signal.SIGTERM, lambda *_: print("not now", flush=True))
    helper = subprocess.Popen(["sleep", "600"])

    async def main():
        async with open_scripted_engine(address, local=True, headless=False) as wire:
            while True:
                await wire.answer(await wire.receive_utility(), helper.pid)

    trio.run(main)
    """
)

DIES_WITH_A_WORD = wire_command_of(
    """
    async def main():
        async with open_scripted_engine(address, local=True, headless=False) as wire:
            await wire.receive_add()
            print("Traceback: the step failed", file=sys.stderr, flush=True)
            await wire.send_dead()
            await trio.sleep(0.05)  # it may be lost: the end of the process says as much

    trio.run(main)
    os._exit(1)
    """
)

LEAVES_WITH_ITS_OWNER = wire_command_of(
    """
    async def main():
        async with open_scripted_engine(address, local=True, headless=False) as wire:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(watch_owner, nursery.cancel_scope)
                await wire.answer(await wire.receive_utility(), os.getpid())
                await trio.sleep_forever()

    async def watch_owner(scope):
        fd = int(sys.argv[sys.argv.index("--owner-fd") + 1])
        async with trio.lowlevel.FdStream(fd) as owner:
            assert await owner.receive_some() == b""
        scope.cancel()

    trio.run(main)
    """
)
