"""Any files around a tokenizer.json give a tokenizer that works, or raise ModelError by name.

The input is these files, in the order of ``_NAMES``; the last ones may be absent. tokenizer.json
itself is the library's to decode.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from fuzz.gguf_tokenizer import check_usable
from fuzz.model_inputs import changed_objects, folder_of, to_json
from fuzz.target import Target, join, split
from trio_engine.errors import ModelError
from trio_engine.text.folder_tokenizer import read_folder_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator

_NAMES = [
    "tokenizer_config.json",
    "added_tokens.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.json",
]
_VOCAB = {token: index for index, token in enumerate(["<s>", "</s>", *"abth1Ġ", "ab", "Ġa"])}
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
_TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": _BYTE_LEVEL | {"use_regex": True},
    "post_processor": None,
    "decoder": _BYTE_LEVEL | {"use_regex": True},
    "model": {"type": "BPE", "vocab": _VOCAB, "merges": [["a", "b"], ["Ġ", "a"]]},
}
_CONFIG: dict[str, Any] = {
    "bos_token": "<s>",
    "eos_token": {"content": "</s>", "special": True},
    "add_bos_token": True,
    "add_eos_token": True,
    "additional_special_tokens": ["<tool>"],
    "extra_special_tokens": {"image_token": "<image>"},
    "added_tokens_decoder": {"10": {"content": "<tool>", "special": True}},
    "chat_template": [{"name": "default", "template": "{{ messages }}"}],
}


def check(data: bytes) -> bool:
    files = dict(zip(_NAMES, split(data), strict=False))
    with folder_of({"tokenizer.json": to_json(_TOKENIZER), **files}) as folder:
        try:
            tokenizer = read_folder_tokenizer(folder)
        except ModelError as error:
            assert str(error).startswith(str(folder))
            return False
    check_usable(tokenizer)
    return True


def make_seeds() -> Iterator[bytes]:
    yield join([to_json(_CONFIG)])
    files = [
        to_json(_CONFIG | {"chat_template": "{{ messages }}"}),
        b'{"<think>": 11}',
        b'{"unk_token": "<s>", "pad_token": {"content": "<pad>"}}',
        b'{"eos_token_id": [1, 2]}',
        b'{"chat_template": "{{ messages }}"}',
    ]
    yield join(files)


def _made_up() -> st.SearchStrategy[bytes]:
    configs = changed_objects(_CONFIG, sorted(_CONFIG))
    words = st.sampled_from(["$A", "$B", "a:b", ":", "", " ", "ab"])
    configs |= words.map(lambda word: to_json(_CONFIG | {"bos_token": word}))
    added = changed_objects({}, ["<think>", ""])
    roles = changed_objects({}, ["eos_token", "unk_token"])
    generation = changed_objects({}, ["eos_token_id"])
    several = st.tuples(configs, added, roles, generation).map(join)
    return configs.map(lambda config: join([config])) | several


TARGET = Target("folder_tokenizer", __doc__, check, _made_up(), make_seeds)
