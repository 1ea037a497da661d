"""A vLLM server with this engine behind it, for those who have vLLM.

``TRIO_ENGINE_VLLM_PYTHON`` names an interpreter with vLLM 0.25.1; without it all is skipped.
``TRIO_ENGINE_VLLM_MODEL`` may name a Hugging Face folder of SmolLM2-135M-Instruct in float32, which
is made otherwise.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.interop.model_folder import write_smollm2
from tests.interop.served_engine import ServedEngine, engine_command, open_served_engine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.interop.open_ai_client import OpenAIClient


@pytest.fixture(scope="session")
def vllm_python() -> str:
    python = os.environ.get("TRIO_ENGINE_VLLM_PYTHON")
    if not python:
        pytest.skip("TRIO_ENGINE_VLLM_PYTHON names no interpreter with vLLM")
    return python


@pytest.fixture(scope="session")
def model(vllm_python: str) -> Iterator[Path]:
    ready = os.environ.get("TRIO_ENGINE_VLLM_MODEL")
    if ready:
        yield Path(ready).resolve()
        return
    with tempfile.TemporaryDirectory() as folder:
        write_smollm2(Path(folder))
        yield Path(folder)


@pytest.fixture(scope="module")
def served(
    vllm_python: str, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServedEngine]:
    logs = tmp_path_factory.mktemp("logs")
    with open_served_engine(vllm_python, model, logs, engine_command(model)) as served:
        yield served


@pytest.fixture
def client(served: ServedEngine) -> OpenAIClient:
    return served.client
