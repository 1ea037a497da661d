"""Prompts of every kind on their way to an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from trio_engine.errors import ModelError, RequestError
from trio_engine.outputs import FinishReason
from trio_engine.sampling_params import SamplingParams
from trio_engine.text.gguf_tokenizer import build_gguf_tokenizer
from trio_engine.text.processor import TextProcessor

if TYPE_CHECKING:
    from trio_engine.text.processor import Prompt
    from trio_engine.text.tokenizer import Tokenizer

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
# As transformers' apply_chat_template gives them for the same file.
FRANCE_TOKEN_IDS = [
    *(1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407),
    *(19712, 8182, 2, 198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520),
    *(9531, 198),
]


@pytest.fixture
def processor(smollm2: Tokenizer) -> TextProcessor:
    return TextProcessor(smollm2, max_model_len=64)


def token_ids(processor: TextProcessor, prompt: Any, **options: Any) -> list[int]:
    return processor.prepare(prompt, SamplingParams(), **options).prompt_token_ids or []


def with_template(metadata: dict[str, Any], template: str | None) -> TextProcessor:
    changed = metadata | {
        "tokenizer.chat_template": template,
        "tokenizer.ggml.add_bos_token": True,
    }
    return TextProcessor(build_gguf_tokenizer(changed, "made-up"), max_model_len=64)


def test_a_chat_is_written_by_the_models_template(processor: TextProcessor) -> None:
    assert token_ids(processor, FRANCE) == FRANCE_TOKEN_IDS


def test_a_chat_can_be_rendered_alone(processor: TextProcessor) -> None:
    text = processor.render_chat(FRANCE, template_variables={"add_generation_prompt": False})
    assert text.endswith("What is the capital of France?<|im_end|>\n")


def test_a_text_gets_the_special_tokens_and_a_chat_those_of_its_template(
    byte_level_metadata: dict[str, Any],
) -> None:
    processor = with_template(byte_level_metadata, "{{ bos_token }}{{ messages[0].content }}")
    assert token_ids(processor, "ab") == token_ids(processor, [{"role": "user", "content": "ab"}])
    assert token_ids(processor, "ab")[0] == 0


def test_tools_and_variables_reach_the_template(byte_level_metadata: dict[str, Any]) -> None:
    processor = with_template(
        byte_level_metadata, "{{ tools[0].name }}{{ x }}{{ messages | length }}"
    )
    chat = [{"role": "user"}]
    variables = {"x": "b", "messages": [], "tools": []}
    tokenizer = processor.tokenizer
    assert tokenizer is not None
    ids = token_ids(processor, chat, tools=[{"name": "a"}], template_variables=variables)
    assert tokenizer.decode(ids) == "ab1"


def test_token_ids_are_copied(processor: TextProcessor) -> None:
    prompt = [5, 6]
    prepared = processor.prepare(prompt, SamplingParams(max_tokens=None))
    assert prepared.prompt_token_ids == prompt
    assert prepared.prompt_token_ids is not prompt
    assert prepared.params.max_tokens == 62
    assert token_ids(processor, (5, 6)) == prompt


@pytest.mark.known_fault(kind="token-out-of-range")
@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt must not be empty, got ''"),
        ([], r"prompt must not be empty, got \[\]"),
        ([1] * 64, r"prompt must be shorter than max_model_len \(64 tokens\), got 64 tokens"),
        ([1, 49152], "prompt must be token ids, 0 to 49151, got 49152 at place 1"),
        ([1, -1], "prompt must be token ids, 0 to 49151, got -1 at place 1"),
        ([True], "got True at place 0"),
        ([1.0], "got 1.0 at place 0"),
        (["a"], "got 'a' at place 0"),
        (b"abc", "prompt must be a str, token ids or messages, got bytes"),
        (None, "prompt must be a str, token ids or messages, got NoneType"),
        ({"role": "user"}, "prompt must be a str, token ids or messages, got dict"),
        ("\ud800", "text must be valid Unicode"),
        ([{"role": "user"}], "messages do not fit the chat template: .*'content'"),
        ([{}], r"messages\[0\] must be a mapping with a role"),
    ],
)
def test_prompts_that_cannot_be_served_are_named(
    processor: TextProcessor, prompt: Any, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        processor.prepare(prompt, SamplingParams())


def test_a_model_may_have_more_rows_than_tokens(smollm2: Tokenizer) -> None:
    processor = TextProcessor(smollm2, max_model_len=64, vocab_size=50000)
    assert token_ids(processor, [49999]) == [49999]
    fewer = TextProcessor(smollm2, max_model_len=64, vocab_size=10)
    assert token_ids(fewer, [49151]) == [49151]


@pytest.mark.known_fault(kind="token-out-of-range")
@pytest.mark.parametrize("prompt", ["text", FRANCE])
def test_without_a_tokenizer_prompts_are_token_ids(prompt: Prompt) -> None:
    processor = TextProcessor(None, max_model_len=64)
    with pytest.raises(RequestError, match="prompt must be token ids because there is no token"):
        processor.prepare(prompt, SamplingParams())
    prepared = processor.prepare([10**6], SamplingParams())
    output = processor.follow(prepared)
    assert output.append([1], FinishReason.LENGTH) == ("", None, 1)


def test_an_output_is_read_with_the_settled_options(
    processor: TextProcessor, smollm2: Tokenizer
) -> None:
    prepared = processor.prepare(FRANCE, SamplingParams(stop=["Paris"]))
    output = processor.follow(prepared)
    answer = smollm2.encode("The capital of France is Paris.<|im_end|>")
    assert output.append(answer).text == "The capital of France is "


def test_a_chat_needs_a_template_that_compiles(byte_level_metadata: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="prompt is a chat, but the model has no chat template"):
        token_ids(with_template(byte_level_metadata, None), FRANCE)
    broken = with_template(byte_level_metadata, "{% if %}")
    assert token_ids(broken, "ab")
    with pytest.raises(ModelError, match="chat template, line 1"):
        token_ids(broken, FRANCE)


def test_a_template_is_compiled_once(processor: TextProcessor) -> None:
    token_ids(processor, FRANCE)
    compiled = processor._chat_template
    token_ids(processor, FRANCE)
    assert processor._chat_template is compiled
