"""An unmodified ``vllm serve`` in front of this engine: what its users ask comes out right.

One pair of processes serves all tests, and the last one ends it; so they are one file.
"""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import jsonschema
import pytest

from tests.interop.answers import (
    Outcome,
    chat,
    generated_outcome,
    num_held,
    only_choice,
    outcome_of,
    text_of,
    wait_quiet,
)
from tests.interop.open_ai_client import CHAT, COMPLETIONS, Json, OpenAIClient
from tests.interop.served_engine import LIMITS, MAX_MODEL_LEN

if TYPE_CHECKING:
    from pathlib import Path

    from tests.interop.served_engine import ServedEngine

pytestmark = pytest.mark.soak

TEXTS = ["Once upon a", "def fibonacci(n: int) -> int:\n    ", "東京は日本の首都で、"]
QUESTIONS = ["What is the capital of France?", "Give me three names for a grey cat."]
NUM_TOKENS = 24

TOKEN = 504
"""Any of the vocabulary, for prompts of a certain length."""

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "colours": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 2},
    },
    "required": ["name", "age", "colours"],
    "additionalProperties": False,
}


def generate(model: Path, prompts: list[str], *options: str) -> list[Json]:
    """What ``trio-engine generate`` answers to the same."""
    command = [sys.executable, "-m", "trio_engine", "generate", "--json", f"--model={model}"]
    result = subprocess.run(
        [*command, *LIMITS, *options, "--", *prompts], stdout=subprocess.PIPE, check=True
    )
    return [json.loads(line) for line in result.stdout.splitlines()]


# Text


def test_greedy_completions_are_those_of_generate(client: OpenAIClient, model: Path) -> None:
    expected = generate(model, TEXTS, "--no-chat", f"--max-tokens={NUM_TOKENS}")
    for text, answer in zip(TEXTS, expected, strict=True):
        ours = client.ask(COMPLETIONS, prompt=text, max_tokens=NUM_TOKENS)
        assert outcome_of(ours) == generated_outcome(answer)


def test_greedy_chats_are_those_of_generate(client: OpenAIClient, model: Path) -> None:
    expected = generate(model, QUESTIONS, "--chat", f"--max-tokens={NUM_TOKENS}")
    assert "stop" in {answer["finish_reason"] for answer in expected}
    for question, answer in zip(QUESTIONS, expected, strict=True):
        ours = client.ask(CHAT, messages=chat(question), max_tokens=NUM_TOKENS)
        assert outcome_of(ours) == generated_outcome(answer)


def test_a_seeded_draw_is_that_of_generate(client: OpenAIClient, model: Path) -> None:
    options = ("--no-chat", "--temperature=1", "--seed=7", f"--max-tokens={NUM_TOKENS}")
    (expected,) = generate(model, TEXTS[:1], *options)
    ours = client.ask(COMPLETIONS, prompt=TEXTS[0], temperature=1, seed=7, max_tokens=NUM_TOKENS)
    assert outcome_of(ours) == generated_outcome(expected)


def test_a_seed_repeats_a_text_and_another_one_does_not(client: OpenAIClient) -> None:
    first, again, other = (
        text_of(
            client.ask(
                COMPLETIONS, prompt=TEXTS[0], temperature=1, seed=seed, max_tokens=NUM_TOKENS
            )
        )
        for seed in (3, 3, 4)
    )
    assert first == again != other


def test_neighbours_change_no_greedy_text(client: OpenAIClient) -> None:
    def ask(text: str) -> Outcome:
        return outcome_of(client.ask(COMPLETIONS, prompt=text, max_tokens=NUM_TOKENS))

    alone = [ask(text) for text in TEXTS]
    with ThreadPoolExecutor(3 * len(TEXTS)) as threads:
        assert list(threads.map(ask, TEXTS * 3)) == alone * 3


def test_a_stream_has_the_text_and_the_usage_of_the_whole_answer(client: OpenAIClient) -> None:
    body = {"messages": chat(QUESTIONS[0]), "max_tokens": NUM_TOKENS}
    whole = client.ask(CHAT, **body)
    with client.stream(CHAT, **body, stream_options={"include_usage": True}) as pieces:
        *parts, last = pieces
    choices = [only_choice(part) for part in parts]
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == text_of(whole)
    reasons = [choice["finish_reason"] for choice in choices]
    assert reasons == [None] * (len(reasons) - 1) + ["stop"]
    assert not last["choices"]
    given = {name: count for name, count in whole["usage"].items() if count is not None}
    assert last["usage"] == given


# Log probabilities


def test_log_probabilities_of_a_greedy_completion_have_the_chosen_tokens_on_top(
    client: OpenAIClient,
) -> None:
    answer = client.ask(COMPLETIONS, prompt=TEXTS[0], max_tokens=8, logprobs=3)
    logprobs = only_choice(answer)["logprobs"]
    assert "".join(logprobs["tokens"]) == text_of(answer)
    assert len(logprobs["tokens"]) == answer["usage"]["completion_tokens"] == 8
    rows = zip(
        *(logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs")), strict=True
    )
    for token, logprob, top in rows:
        assert len(top) == 3
        assert max(top, key=lambda other: top[other]) == token
        assert top[token] == logprob <= 0


def test_log_probabilities_of_a_chat_have_the_drawn_token_and_the_best_in_order(
    client: OpenAIClient,
) -> None:
    answer = client.ask(
        CHAT,
        messages=chat(QUESTIONS[1]),
        max_tokens=8,
        temperature=1,
        seed=5,
        logprobs=True,
        top_logprobs=4,
    )
    content = only_choice(answer)["logprobs"]["content"]
    assert "".join(token["token"] for token in content) == text_of(answer)
    for token in content:
        assert bytes(token["bytes"]).decode() == token["token"]
        # The front end puts the drawn token first, then the best ones in order.
        first, *others = token["top_logprobs"]
        assert (first["token"], first["logprob"]) == (token["token"], token["logprob"])
        logprobs = [other["logprob"] for other in others]
        assert logprobs == sorted(logprobs, reverse=True)
        assert len({other["token"] for other in token["top_logprobs"]}) == 4


def test_log_probabilities_of_a_prompt_are_those_of_what_was_generated(
    client: OpenAIClient,
) -> None:
    body = {"max_tokens": 4, "logprobs": 1, "return_token_ids": True}
    answer = only_choice(client.ask(COMPLETIONS, prompt=TEXTS[0], **body))
    prompt = [*answer["prompt_token_ids"], *answer["token_ids"]]
    echo = only_choice(client.ask(COMPLETIONS, prompt=prompt, echo=True, **body))
    assert echo["prompt_token_ids"] == prompt
    start = len(answer["prompt_token_ids"])
    found = echo["logprobs"]["token_logprobs"]
    assert found[0] is None  # nothing comes before it
    assert found[start : start + 4] == pytest.approx(answer["logprobs"]["token_logprobs"], abs=1e-3)


# Several answers


def test_three_answers_have_an_index_and_a_reason_each(client: OpenAIClient) -> None:
    body = {"prompt": TEXTS[0], "n": 3, "temperature": 1, "seed": 11, "max_tokens": 12}
    answer = client.ask(COMPLETIONS, **body, ignore_eos=True)
    choices = answer["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert {choice["finish_reason"] for choice in choices} == {"length"}
    assert len({choice["text"] for choice in choices}) == 3
    assert answer["usage"]["completion_tokens"] == 3 * 12
    streamed: dict[int, list[Json]] = {0: [], 1: [], 2: []}
    with client.stream(COMPLETIONS, **body, ignore_eos=True) as pieces:
        for part in (choice for piece in pieces for choice in piece["choices"]):
            streamed[part["index"]].append(part)
    for parts, choice in zip(streamed.values(), choices, strict=True):
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == ["length"]
    wait_quiet(client)


# Ends


@pytest.mark.parametrize("is_included", [False, True])
def test_a_stop_string_cuts_the_text_and_ends_the_request(
    is_included: bool, client: OpenAIClient
) -> None:
    whole = text_of(client.ask(COMPLETIONS, prompt=TEXTS[0], max_tokens=NUM_TOKENS))
    # In the middle of words, so that no token ends where it does.
    stop = whole[len(whole) // 2 - 3 : len(whole) // 2 + 3]
    cut = whole[: whole.index(stop)]
    answer = client.ask(
        COMPLETIONS,
        prompt=TEXTS[0],
        max_tokens=200,
        ignore_eos=True,
        stop=[stop, "never said"],
        include_stop_str_in_output=is_included,
    )
    choice = only_choice(answer)
    assert choice["text"] == (cut + stop if is_included else cut)
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert answer["usage"]["completion_tokens"] < NUM_TOKENS
    wait_quiet(client)


def test_a_stop_token_ends_the_request(client: OpenAIClient) -> None:
    body = {"prompt": TEXTS[0], "max_tokens": NUM_TOKENS, "return_token_ids": True}
    token_ids = only_choice(client.ask(COMPLETIONS, **body))["token_ids"]
    stop = token_ids[9]
    choice = only_choice(client.ask(COMPLETIONS, **body, stop_token_ids=[stop]))
    assert choice["token_ids"] == token_ids[: token_ids.index(stop) + 1]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


def test_ignore_eos_goes_on_to_max_tokens(client: OpenAIClient) -> None:
    body = {"messages": chat(QUESTIONS[0]), "max_tokens": NUM_TOKENS}
    text, reason, _, num_tokens = outcome_of(client.ask(CHAT, **body))
    assert reason == "stop"
    assert num_tokens < NUM_TOKENS
    longer = outcome_of(client.ask(CHAT, **body, ignore_eos=True))
    assert longer[0].startswith(text)
    assert (longer[1], longer[3]) == ("length", NUM_TOKENS)


def test_min_tokens_holds_the_end_off(client: OpenAIClient) -> None:
    body = {"messages": chat(QUESTIONS[0]), "max_tokens": NUM_TOKENS}
    assert client.ask(CHAT, **body)["usage"]["completion_tokens"] < 15
    assert client.ask(CHAT, **body, min_tokens=15)["usage"]["completion_tokens"] >= 15


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_one_token_is_one_token(path: str, client: OpenAIClient) -> None:
    body: Json = {"prompt": TEXTS[0]} if path == COMPLETIONS else {"messages": chat(QUESTIONS[0])}
    short = outcome_of(client.ask(path, **body, max_tokens=1))
    assert (short[1], short[3]) == ("length", 1)
    assert short[0]
    assert text_of(client.ask(path, **body, max_tokens=5)).startswith(short[0])


def test_the_longest_prompt_leaves_room_for_one_token(client: OpenAIClient) -> None:
    prompt = [TOKEN] * (MAX_MODEL_LEN - 1)
    text, *counts = outcome_of(client.ask(COMPLETIONS, prompt=prompt, max_tokens=1))
    assert text
    assert counts == ["length", MAX_MODEL_LEN - 1, 1]
    # The front end's word, which knows the limit from the engine as well.
    refusal = client.refusal(COMPLETIONS, prompt=[*prompt, TOKEN], max_tokens=1)
    assert refusal.status == 400
    assert f"maximum context length is {MAX_MODEL_LEN} tokens" in refusal.message


def test_a_client_that_hangs_up_leaves_no_request_behind(client: OpenAIClient) -> None:
    try:
        with client.stream(COMPLETIONS, prompt=TEXTS[0], max_tokens=240, ignore_eos=True) as pieces:
            assert next(pieces)["choices"][0]["text"]
            # From here on nothing is computed, so nothing but the hang-up can end the request.
            client.post("/pause?mode=keep")
            assert num_held(client) == 1
        wait_quiet(client)
    finally:
        client.post("/resume")
    assert text_of(client.ask(COMPLETIONS, prompt=TEXTS[0], max_tokens=4))


# Constraints


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_json_schema_is_followed(temperature: float, client: OpenAIClient) -> None:
    answer = client.ask(
        CHAT,
        messages=chat("Describe a person."),
        max_tokens=200,
        temperature=temperature,
        seed=1,
        response_format={"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}},
    )
    assert only_choice(answer)["finish_reason"] == "stop"
    jsonschema.validate(json.loads(text_of(answer)), PERSON)


@pytest.mark.parametrize(
    ("outputs", "texts"),
    [
        ({"choice": ["green", "grey"]}, {"green", "grey"}),
        ({"regex": "(ab){2}"}, {"abab"}),
        ({"grammar": 'root ::= "yes" | "no"'}, {"yes", "no"}),
    ],
)
def test_other_constraints_are_followed(
    outputs: Json, texts: set[str], client: OpenAIClient
) -> None:
    answer = client.ask(
        CHAT,
        messages=chat(QUESTIONS[0]),
        max_tokens=20,
        structured_outputs=outputs,
    )
    assert text_of(answer) in texts
    assert only_choice(answer)["finish_reason"] == "stop"


def test_a_biased_token_and_an_allowed_one_are_drawn(client: OpenAIClient) -> None:
    body = {"prompt": TEXTS[0], "max_tokens": 3, "return_token_ids": True}
    for edit in ({"logit_bias": {str(TOKEN): 100}}, {"allowed_token_ids": [TOKEN]}):
        assert only_choice(client.ask(COMPLETIONS, **body, **edit))["token_ids"] == [TOKEN] * 3


# Steering


def test_a_pause_holds_a_stream_and_changes_nothing_of_it(client: OpenAIClient) -> None:
    body = {"prompt": TEXTS[0], "max_tokens": NUM_TOKENS}
    whole = text_of(client.ask(COMPLETIONS, **body))
    with client.stream(COMPLETIONS, **body) as pieces:
        first = next(pieces)
        try:
            client.post("/pause?mode=keep")
            assert json.loads(client.get("/is_paused")) == {"is_paused": True}
            assert num_held(client) == 1
        finally:
            client.post("/resume")
        text = "".join(only_choice(piece)["text"] for piece in [first, *pieces])
    assert text == whole


def test_the_prefix_cache_is_reset(client: OpenAIClient) -> None:
    def num_hits() -> float:
        before = client.metric("vllm:prefix_cache_hits_total")
        client.ask(COMPLETIONS, prompt=[TOKEN] * 100, max_tokens=1)
        return client.metric("vllm:prefix_cache_hits_total") - before

    num_hits()
    assert num_hits() > 0
    client.post("/reset_prefix_cache")
    assert num_hits() == 0


def test_sleep_and_wake_up_change_no_text(client: OpenAIClient) -> None:
    body = {"prompt": TEXTS[0], "max_tokens": 8}
    awake = text_of(client.ask(COMPLETIONS, **body))
    for level in (1, 2):
        client.post(f"/sleep?level={level}")
        assert json.loads(client.get("/is_sleeping")) == {"is_sleeping": True}
        client.post("/wake_up")
        assert json.loads(client.get("/is_sleeping")) == {"is_sleeping": False}
        assert text_of(client.ask(COMPLETIONS, **body)) == awake


# The end


def test_both_end_as_they_are_asked_to(served: ServedEngine) -> None:
    wait_quiet(served.client)
    assert served.front_end.end() == 0, served.front_end.log[-4000:]
    # Its own end cancels the task that reads outputs, which another one may still log as a failure.
    served_log, its_end, _ = served.front_end.log.partition("[shutdown] API server")
    assert its_end
    assert "Traceback" not in served_log
    assert served.engine.is_running  # what was started apart outlives its front end
    assert served.engine.end() == 0, served.engine.log[-4000:]
    assert "Traceback" not in served.engine.log
