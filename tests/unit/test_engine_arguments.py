"""Flags and config say the same: every field survives the way to the child and back."""

from __future__ import annotations

import argparse
from typing import Any

import msgspec
import pytest

from trio_engine.config import EngineConfig
from trio_engine.engine_arguments import (
    add_engine_arguments,
    config_from_arguments,
    config_to_arguments,
)
from trio_engine.errors import ConfigError

OTHER_VALUES: dict[str, list[Any]] = {
    "model": ["/models/a b", "-starts-with-a-dash", "100%"],
    "tokenizer": ["/models/t"],
    "executor": ["null", "kv-checking"],
    "null_step_ms": [2.5, 1e-07],
    "device": ["cpu", "cuda"],
    "dtype": ["float32", "bfloat16", "float16"],
    "quantization": ["int8", "int4"],
    "linear_backend": ["torch", "mkl"],
    "cuda_graphs": [True],
    "max_model_len": [64],
    "max_num_seqs": [1],
    "max_num_batched_tokens": [512],
    "long_prefill_token_threshold": [128],
    "scheduling_policy": ["priority"],
    "enable_prefix_caching": [False],
    "enable_lora": [True],
    "max_loras": [4],
    "max_lora_rank": [64],
    "block_size": [4],
    "num_blocks": [16],
    "kv_cache_bytes": [1 << 40],
    "max_waiting_requests": [0, 7],
    "grammar_timeout_s": [0.5],
    "max_grammar_bytes": [4096],
    "pipeline_depth": [1],
    "shutdown_timeout_s": [0.1 + 0.2, 3],
    "handshake_timeout_s": [0.0],
    "flush_timeout_s": [0.25],
    "exit_grace_s": [0.5],
    "outbox_limit_bytes": [1],
    "log_stats": [False],
    "trace": ["/tmp/a b.json"],
}
"""For each field, values that are not its default."""


def parse(arguments: list[str]) -> EngineConfig:
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    return config_from_arguments(parser.parse_args(arguments))


def test_every_field_is_covered_here() -> None:
    assert set(OTHER_VALUES) == set(EngineConfig.__struct_fields__)


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in OTHER_VALUES.items() for value in values]
)
def test_each_field_survives_the_round_trip(name: str, value: Any) -> None:
    config = msgspec.structs.replace(EngineConfig(), **{name: value})
    arguments = config_to_arguments(config)
    assert len(arguments) == 1
    assert parse(arguments) == config


def test_all_fields_at_once_survive_the_round_trip() -> None:
    config = EngineConfig(**{name: values[0] for name, values in OTHER_VALUES.items()})
    assert parse(config_to_arguments(config)) == config


def test_defaults_need_no_flags() -> None:
    assert config_to_arguments(EngineConfig()) == []
    assert parse([]) == EngineConfig()


@pytest.mark.parametrize(
    ("config", "flag"),
    [
        (EngineConfig(max_num_seqs=1), "--max-num-seqs=1"),
        (EngineConfig(shutdown_timeout_s=1.5), "--shutdown-timeout=1.5"),
        (EngineConfig(null_step_ms=2.0), "--null-step-ms=2.0"),
        (EngineConfig(log_stats=False), "--no-log-stats"),
    ],
)
def test_flag_names(config: EngineConfig, flag: str) -> None:
    assert config_to_arguments(config) == [flag]


def test_separate_words_are_read_too() -> None:
    config = parse(["--executor", "null", "--null-step-ms", "2", "--log-stats"])
    assert config == EngineConfig(executor="null", null_step_ms=2.0)


def test_value_out_of_range_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="max_num_seqs must be 1 or more, got 0"):
        parse(["--max-num-seqs=0"])


def test_help_documents_every_flag() -> None:
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    text = " ".join(parser.format_help().split())
    assert "how long an orderly end lets requests finish" in text
    for action in parser._actions:
        assert action.help
