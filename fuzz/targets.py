"""The list of targets. They are imported when asked for, so that Atheris can instrument them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fuzz.target import Target

NAMES = (
    "request_frames",
    "output_frames",
    "handshake",
    "gguf_model",
    "gguf_tokenizer",
    "folder_tokenizer",
    "safetensors_files",
    "hf_config",
    "chat_messages",
    "chat_template",
    "grammar_source",
)


def load_target(name: str) -> Target:
    """The target of the module of this name."""
    target: Target = import_module(f"fuzz.{name}").TARGET
    return target
