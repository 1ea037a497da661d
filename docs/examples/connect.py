"""In front of an engine that is started elsewhere: ``connect.py tcp://HOST:PORT``."""

import sys

import trio

from trio_engine import SamplingParams, connect_engine


async def main(handshake_address: str) -> None:
    async with connect_engine(handshake_address) as engine:
        output = await engine.complete([1, 2, 3], SamplingParams(max_tokens=8))
        print(output.token_ids)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: connect.py tcp://HOST:PORT")
    trio.run(main, sys.argv[1])
