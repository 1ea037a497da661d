"""What an answer of an OpenAI-compatible server says, and when a server has nothing to do."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tests.interop.open_ai_client import Json, OpenAIClient

QUIET_TIMEOUT_S = 30.0
POLL_INTERVAL_S = 0.1


class Outcome(NamedTuple):
    """All of one answer that another way to ask must give as well."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int


def chat(question: str) -> list[Json]:
    return [{"role": "user", "content": question}]


def only_choice(answer: Json) -> Json:
    (choice,) = answer["choices"]
    assert choice["index"] == 0
    found: Json = choice
    return found


def text_of(answer: Json) -> str:
    choice = only_choice(answer)
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def outcome_of(answer: Json) -> Outcome:
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    return Outcome(
        text_of(answer),
        only_choice(answer)["finish_reason"],
        usage["prompt_tokens"],
        usage["completion_tokens"],
    )


def generated_outcome(answer: Json) -> Outcome:
    return Outcome(
        answer["text"],
        answer["finish_reason"],
        answer["prompt_tokens"],
        answer["completion_tokens"],
    )


def num_held(client: OpenAIClient) -> float:
    """Requests that the engine runs or keeps waiting, as it has told the front end."""
    return sum(client.metric(f"vllm:num_requests_{state}") for state in ("running", "waiting"))


def wait_quiet(client: OpenAIClient) -> None:
    """Returns when the engine has said that it holds no request."""
    deadline = time.monotonic() + QUIET_TIMEOUT_S
    while held := num_held(client):
        assert time.monotonic() < deadline, f"the engine holds {held:g} requests"
        time.sleep(POLL_INTERVAL_S)  # the front end only tells when it is asked
