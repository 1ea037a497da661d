"""An engine's options are checked once, by name and value."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from trio_engine.config import EngineConfig
from trio_engine.errors import ConfigError

COUNTS = [
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "num_blocks",
    "kv_cache_bytes",
    "outbox_limit_bytes",
]
DURATIONS = [
    "null_step_ms",
    "shutdown_timeout_s",
    "handshake_timeout_s",
    "flush_timeout_s",
    "exit_grace_s",
]


def refusal(**options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**options)
    return str(caught.value)


def test_the_defaults_are_a_configuration_that_can_work() -> None:
    config = EngineConfig()
    assert (config.model, config.executor, config.pipeline_depth) == ("smollm2", "torch", 2)


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [0, -1])
def test_a_count_is_1_or_more(name: str, value: int) -> None:
    valid: dict[str, Any] = {name: 1}
    assert getattr(EngineConfig(**valid), name) == 1
    assert refusal(**{name: value}) == f"{name} must be 1 or more, got {value}"


@pytest.mark.parametrize("name", DURATIONS)
@pytest.mark.parametrize("value", [-0.1, float("inf"), float("nan")])
def test_a_duration_is_0_or_more_and_finite(name: str, value: float) -> None:
    valid: dict[str, Any] = {name: 0.0}
    assert getattr(EngineConfig(**valid), name) == 0.0
    assert refusal(**{name: value}) == f"{name} must be 0 or more and finite, got {value}"


def test_no_limit_for_long_prompts_is_0_and_none_is_negative() -> None:
    assert EngineConfig().long_prefill_token_threshold == 0
    expected = "long_prefill_token_threshold must be 0 or more, got -1"
    assert refusal(long_prefill_token_threshold=-1) == expected


def test_no_waiting_request_may_be_allowed_but_no_negative_number() -> None:
    assert EngineConfig(max_waiting_requests=0).max_waiting_requests == 0
    assert EngineConfig(max_waiting_requests=None).max_waiting_requests is None
    assert refusal(max_waiting_requests=-1) == "max_waiting_requests must be 0 or more, got -1"


@pytest.mark.parametrize(
    ("name", "value", "some_choice"),
    [
        ("executor", "Torch", "kv-checking"),
        ("device", "gpu", "cuda"),
        ("dtype", "fp16", "bfloat16"),
        ("quantization", "int3", "int8"),
        ("linear_backend", "cublas", "mkl"),
        ("pipeline_depth", 3, "2"),
        ("pipeline_depth", 0, "1"),
        ("scheduling_policy", "lifo", "priority"),
    ],
)
def test_a_word_that_is_none_of_the_choices_is_refused_with_them(
    name: str, value: Any, some_choice: str
) -> None:
    message = refusal(**{name: value})
    assert message.startswith(f"{name} must be one of (")
    assert some_choice in message
    assert message.endswith(f"got {value!r}")


def test_a_config_is_not_changed_but_replaced_and_then_checked_again() -> None:
    config = EngineConfig()
    with pytest.raises(AttributeError):
        config.block_size = 4  # type: ignore[misc]
    assert msgspec.structs.replace(config, block_size=4).block_size == 4
    with pytest.raises(ConfigError):
        msgspec.structs.replace(config, block_size=0)
