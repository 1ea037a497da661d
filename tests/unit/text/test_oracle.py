"""Our tokenizers and chat templates against transformers' on the same input."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import gguf
import pytest
from tokenizers import Tokenizer as Backend, decoders, models, pre_tokenizers, trainers

from trio_engine.checkpoint import ModelFiles
from trio_engine.text.chat import render_chat
from trio_engine.text.processor import TextProcessor
from trio_engine.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from trio_engine.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow  # importing transformers alone takes seconds

PARTS = [
    *(" ", "  ", "\n", "\t", "\r\n", "\u00a0", "\u200b", "\u3000", "\x00", "\ufffd", "\u2581"),
    *("a", "Hello", "the cat", "naïve", "é", "e\u0301", "ß", "日本", "😀", "👨\u200d👩\u200d👧"),
    *("1", "23", "½", "²", "٣", "'s", "'LL", "{}", "_", "def f(x):", "<0x41>"),
    *("<|im_start|>", "<|im_end|>", "<|im", "|>", "<s>", "</s>", "<unk>", "<tool>"),
]
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]


def texts(count: int) -> Iterator[str]:
    rng = random.Random(1)
    for _ in range(count):
        yield "".join(rng.choices(PARTS, k=rng.randrange(20)))
        yield "".join(chr(rng.randrange(0xD800)) for _ in range(rng.randrange(20)))


def transformers_tokenizer(path: Path, file: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(path), gguf_file=file)


def check_same(ours: Tokenizer, theirs: Any) -> None:
    for text in texts(1500):
        token_ids = ours.encode(text)
        assert token_ids == theirs.encode(text), text
        for skip in (True, False):
            decoded = theirs.decode(token_ids, skip_special_tokens=skip)
            assert ours.decode(token_ids, skip_special_tokens=skip) == decoded


def test_smollm2_is_transformers_but_for_spaces_before_digits(
    smollm2: Tokenizer, smollm2_files: ModelFiles
) -> None:
    theirs = transformers_tokenizer(smollm2_files.path.parent, smollm2_files.path.name)
    processor = TextProcessor(smollm2, max_model_len=8192)
    chat = theirs.apply_chat_template(FRANCE, add_generation_prompt=True)["input_ids"]
    text = processor.render_chat(FRANCE)
    assert smollm2.encode(text, add_special_tokens=False) == chat

    # Their reader of GGUF does not know the word split "smollm" and takes GPT-2's. The model's
    # own tokenizer.json cuts digits apart first, as here; with that they agree on everything.
    assert smollm2.encode("x   1") != theirs.encode("x   1")
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    check_same(smollm2, theirs)


def test_sentencepiece_from_gguf_is_transformers(tmp_path: Path) -> None:
    write_sentencepiece(tmp_path / "model.gguf")
    ours = load_tokenizer(ModelFiles("gguf", tmp_path / "model.gguf"))
    check_same(ours, transformers_tokenizer(tmp_path, "model.gguf"))


def write_sentencepiece(path: Path) -> None:
    """A vocabulary learned from a few lines, written as llama.cpp's converter does."""
    learned = Backend(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    lines = ["the cat sat on the mat, Hello", "def f(x): 1 23  naïve", "a  b   c 日本"] * 3
    learned.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=120, show_progress=False))
    words = sorted(
        learned.get_vocab(), key=lambda word: (len(word) == 1, learned.token_to_id(word))
    )
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *byte_tokens, "<tool>", *words])
    writer.add_token_scores([0.0] * 260 + [-float(rank) for rank in range(len(words))])
    writer.add_token_types([2, 3, 3] + [6] * 256 + [4] + [1] * len(words))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_folder_that_transformers_wrote_is_read_as_it_reads_it(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    learned = Backend(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    learned.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, show_progress=False, initial_alphabet=alphabet, special_tokens=["<s>"]
    )
    learned.train_from_iterator(["the cat sat, Hello 日本", "def f(x): 23"] * 3, trainer)
    make: Any = PreTrainedTokenizerFast
    theirs = make(tokenizer_object=learned, bos_token="<s>", eos_token="</s>", add_bos_token=True)
    theirs.chat_template = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    theirs.save_pretrained(str(tmp_path))
    read_back = PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    ours = load_tokenizer(ModelFiles("folder", tmp_path))
    check_same(ours, read_back)
    assert ours.eos_token_id == read_back.eos_token_id
    rendered = read_back.apply_chat_template(FRANCE, tokenize=False)
    assert TextProcessor(ours, max_model_len=99).render_chat(FRANCE) == rendered


TEMPLATES = {
    "turns": (
        "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
        "{% set messages = messages[1:] %}{% endif %}\n"
        "{% for m in messages %}\n"
        "    {% if (m.role == 'user') != (loop.index0 % 2 == 0) %}\n"
        "        {{ raise_exception('roles must alternate') }}\n"
        "    {% endif %}\n"
        "{{ bos_token + '[INST] ' + (system ~ ' ' if system and loop.first else '') }}"
        "{{- m.content | trim + ' [/INST]' }}\n"
        "{% endfor %}"
    ),
    "tools": (
        "{%- set ns = namespace(last=-1) %}\n"
        "{%- for tool in tools or [] %}{{ tool | tojson(indent=2) }}\n{% endfor %}\n"
        "{%- for m in messages %}\n"
        "    {%- if m.role == 'user' %}{% set ns.last = loop.index0 %}{% continue %}{% endif %}\n"
        "    {%- generation %}{{ m.content or '' }}{% endgeneration %}\n"
        "    {%- for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}{% endfor %}\n"
        "{%- endfor %}{{ ns.last }}{{ '<a>' if add_generation_prompt }}"
    ),
    "parts": (
        "{% macro show(content) %}{% if content is string %}{{ content }}{% else %}"
        "{% for part in content if part.type == 'text' %}{{ part.text }}{% endfor %}{% endif %}"
        "{% endmacro %}\n"
        "{% for m in messages[::-1] %}{{ show(m.content) }}|{{ m.get('name', '?') }}"
        "{% if not loop.last %}, {% endif %}{% endfor %}{{ documents is defined }}{{ thinking }}"
    ),
}
TWICE: list[dict[str, Any]] = [*FRANCE, *FRANCE]
CHATS: list[list[dict[str, Any]]] = [
    FRANCE,
    TWICE,
    [{"role": "system", "content": "Be <brief>."}, {"role": "user", "content": " Hi \n"}],
    [
        {"role": "user", "content": [{"type": "text", "text": "Größe?"}, {"type": "image"}]},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1.5, "y": None}}}],
        },
    ],
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "a < b & 'é'"}}]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_templates_render_as_in_transformers(
    name: str, chat: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> None:
    ours = outcome_of_ours(TEMPLATES[name], chat, tools)
    assert ours == outcome_of_theirs(TEMPLATES[name], chat, tools)
    assert (ours is None) == (name == "turns" and chat is TWICE)


def outcome_of_ours(template: str, chat: list[dict[str, Any]], tools: Any) -> str | None:
    from trio_engine.errors import RequestError

    try:
        return render_chat(template, chat, tools=tools, bos_token="<s>", thinking=True)
    except RequestError:
        return None


def outcome_of_theirs(template: str, chat: list[dict[str, Any]], tools: Any) -> str | None:
    from transformers.utils.chat_template_utils import render_jinja_template

    render: Any = render_jinja_template
    try:
        texts, _ = render(
            [chat],
            tools=tools,
            chat_template=template,
            add_generation_prompt=True,
            bos_token="<s>",
            thinking=True,
        )
    except Exception:
        return None
    return str(texts[0])
