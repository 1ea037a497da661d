"""Tokenizers read from Hugging Face folders, with the variants of the files around them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer as Backend, decoders, models, pre_tokenizers, processors

from trio_engine.errors import ModelError
from trio_engine.text.folder_tokenizer import read_folder_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

VOCAB = ["<s>", "</s>", "<eot>", "a", "b", "Ġ"]
CONFIG = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}, "pad_token": None}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with ``tokenizer.json`` (which puts BOS first) and ``tokenizer_config.json``."""
    backend = Backend(models.BPE({token: i for i, token in enumerate(VOCAB)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single=["<s>", "$A"], special_tokens=[("<s>", 0)]
    )
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "tokenizer_config.json", CONFIG)
    return tmp_path


def write(folder: Path, name: str, content: Any) -> None:
    (folder / name).write_text(json.dumps(content), encoding="utf-8")


def test_a_prompt_is_neither_cut_nor_padded(folder: Path) -> None:
    assert read_folder_tokenizer(folder).encode("ab ab") == [0, 3, 4, 5, 3, 4]


def test_tokenizer_json_alone_is_enough(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    tokenizer = read_folder_tokenizer(folder)
    assert tokenizer.encode("a") == [0, 3]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (None, ())
    assert tokenizer.chat_template is None


def test_roles_come_from_the_configuration_before_the_special_tokens_map(folder: Path) -> None:
    write(folder, "special_tokens_map.json", {"eos_token": "<eot>", "unk_token": "<eot>"})
    tokenizer = read_folder_tokenizer(folder)
    assert tokenizer.special_tokens == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<eot>",
    }
    assert tokenizer.special_token_ids == {0, 1, 2}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, [0, 3]),
        ({"add_bos_token": False}, [3]),
        ({"add_eos_token": True}, [3, 1]),
        ({"add_bos_token": True, "add_eos_token": True}, [0, 3, 1]),
        ({"add_bos_token": True, "bos_token": None}, [3]),
    ],
)
def test_flags_for_bos_and_eos_replace_what_tokenizer_json_does(
    folder: Path, flags: dict[str, Any], expected: list[int]
) -> None:
    write(folder, "tokenizer_config.json", CONFIG | flags)
    assert read_folder_tokenizer(folder).encode("a") == expected


def test_added_tokens_that_tokenizer_json_lacks_get_their_ids(folder: Path) -> None:
    write(folder, "added_tokens.json", {"<two>": 7})
    added = {
        "2": {"content": "<eot>", "special": True},
        "6": {"content": "<one>", "special": False},
    }
    write(folder, "tokenizer_config.json", CONFIG | {"added_tokens_decoder": added})
    tokenizer = read_folder_tokenizer(folder)
    assert tokenizer.encode("a<two><one><eot>", add_special_tokens=False) == [3, 7, 6, 2]
    assert tokenizer.decode([3, 7, 6, 2]) == "a<two><one>"
    assert tokenizer.vocab_size == 8


def test_an_added_token_that_cannot_have_its_id_is_refused(folder: Path) -> None:
    write(folder, "added_tokens.json", {"<far>": 99})
    with pytest.raises(ModelError, match="'<far>' cannot have the id 99"):
        read_folder_tokenizer(folder)


@pytest.mark.parametrize(
    "entry",
    [
        {"additional_special_tokens": ["<eot>"]},
        {"additional_special_tokens": [{"content": "<eot>"}]},
        {"extra_special_tokens": {"turn_token": "<eot>"}},
    ],
)
def test_more_special_tokens_are_special(folder: Path, entry: dict[str, Any]) -> None:
    write(folder, "tokenizer_config.json", CONFIG | entry)
    assert 2 in read_folder_tokenizer(folder).special_token_ids


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (1,)),
        ({"generation_config.json": {"eos_token_id": 2}}, (1, 2)),
        ({"generation_config.json": {"eos_token_id": [2, 1]}}, (1, 2)),
        ({"generation_config.json": {"max_length": 5}, "config.json": {"eos_token_id": 2}}, (1,)),
        ({"config.json": {"eos_token_id": 2}}, (1, 2)),
    ],
)
def test_everything_that_ends_an_output_is_found(
    folder: Path, files: dict[str, Any], expected: tuple[int, ...]
) -> None:
    for name, content in files.items():
        write(folder, name, content)
    assert read_folder_tokenizer(folder).eos_token_ids == expected


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("in config", "in config"),
        ([{"name": "tool_use", "template": "x"}, {"name": "default", "template": "y"}], "y"),
        ([{"name": "tool_use", "template": "x"}], None),
    ],
)
def test_chat_template_in_the_configuration(
    folder: Path, template: Any, expected: str | None
) -> None:
    write(folder, "tokenizer_config.json", CONFIG | {"chat_template": template})
    assert read_folder_tokenizer(folder).chat_template == expected


def test_chat_templates_in_files_go_first(folder: Path) -> None:
    write(folder, "tokenizer_config.json", CONFIG | {"chat_template": "in config"})
    write(folder, "chat_template.json", {"chat_template": "in json"})
    assert read_folder_tokenizer(folder).chat_template == "in json"
    (folder / "chat_template.jinja").write_text("in jinja é", encoding="utf-8")
    assert read_folder_tokenizer(folder).chat_template == "in jinja é"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", b"{}"),
        ("tokenizer.json", b"\xff"),
        ("tokenizer_config.json", b"[1]"),
        ("tokenizer_config.json", b"{"),
        ("tokenizer_config.json", b'{"x": ' + b"[" * 10_000),
        ("generation_config.json", b"\xff"),
        ("chat_template.jinja", b"\xff"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"x": {"content": "a"}}}'),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"7": {}}}'),
        ("tokenizer_config.json", b'{"added_tokens_decoder": []}'),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "default"}]}'),
        ("added_tokens.json", b'{"<two>": "7"}'),
        ("generation_config.json", b'{"eos_token_id": "2"}'),
        ("generation_config.json", b'{"eos_token_id": ["2"]}'),
    ],
)
def test_a_damaged_file_is_named(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(ModelError, match=name):
        read_folder_tokenizer(folder)


def test_a_missing_tokenizer_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json: there is no such file"):
        read_folder_tokenizer(tmp_path)
