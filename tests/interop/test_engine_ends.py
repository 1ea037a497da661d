"""Engines that end while an unmodified ``vllm serve`` has a request at them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.interop.answers import only_choice
from tests.interop.open_ai_client import COMPLETIONS
from tests.interop.served_engine import MAX_MODEL_LEN, open_served_engine
from tests.process.engine_programs import engine_command, scripted_command

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.soak

LIMIT = f"--max-model-len={MAX_MODEL_LEN}"
LONG = {"prompt": "Once upon a", "max_tokens": 240, "ignore_eos": True}

IS_HEADLESS = """
def __init__(self, *args, **options):
    from trio_engine.engine.engine_core_proc import EngineIdentity

    super().__init__(*args, identity=EngineIdentity(local=False, headless=True), **options)
"""

FIFTH_STEP_FAILS = """
num_steps = 0

def collect(self):
    self.num_steps += 1
    if self.num_steps > 4:
        raise RuntimeError("device lost")
    return super().collect()
"""


def test_an_engine_that_is_asked_to_stop_ends_its_requests_with_abort(
    vllm_python: str, model: Path, tmp_path: Path
) -> None:
    command = engine_command("--headless", "--null-step-ms=50", LIMIT)
    with (
        open_served_engine(vllm_python, model, tmp_path, command) as served,
        served.client.stream(COMPLETIONS, **LONG) as pieces,
    ):
        assert only_choice(next(pieces))["text"]
        assert served.engine.end() == 0, served.engine.log
        *_, last = pieces
        assert only_choice(last)["finish_reason"] == "abort"
        assert served.front_end.end() == 0


def test_an_engine_that_breaks_ends_the_request_and_the_front_end(
    vllm_python: str, model: Path, tmp_path: Path
) -> None:
    command = scripted_command(LIMIT, executor=FIFTH_STEP_FAILS, proc=IS_HEADLESS)
    with open_served_engine(vllm_python, model, tmp_path, command) as served:
        refusal = served.client.refusal(COMPLETIONS, **LONG)
        assert refusal.status == 500
        assert "EngineCore" in refusal.message
        assert served.engine.wait() == 1
        assert served.front_end.wait() == 0  # it does not outlive its engine
