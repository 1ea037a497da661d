import trio

from trio_engine import RequestOutputKind, SamplingParams, open_engine


async def main() -> None:
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    params = SamplingParams(temperature=0, max_tokens=32, output_kind=RequestOutputKind.DELTA)
    async with open_engine() as engine, engine.generate(chat, params) as stream:
        async for delta in stream:
            print(delta.text, end="", flush=True)
    print()


trio.run(main)
