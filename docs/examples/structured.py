"""Answers of a given form: JSON by a schema, and one of several words."""

import json

import trio

from trio_engine import SamplingParams, StructuredOutputsParams, open_engine

CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "country": {"type": "string", "maxLength": 20},
        "is_capital": {"type": "boolean"},
    },
    "required": ["city", "country", "is_capital"],
    "additionalProperties": False,
}
FRANCE = [{"role": "user", "content": "What is the capital of France? Answer in JSON."}]
SKY = [{"role": "user", "content": "What is the colour of a clear sky?"}]


def greedy(structured: StructuredOutputsParams) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=100, structured_outputs=structured)


async def main() -> None:
    async with open_engine() as engine:
        by_schema = StructuredOutputsParams(json=CITY, disable_any_whitespace=True)
        answer = await engine.complete(FRANCE, greedy(by_schema))
        print(json.loads(answer.text))
        one_of = StructuredOutputsParams(choice=["red", "green", "blue"])
        answer = await engine.complete(SKY, greedy(one_of))
        print(answer.text, answer.finish_reason)


trio.run(main)
