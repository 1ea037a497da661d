"""The request struct: the first nine fields are required, a missing tail means defaults."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from trio_engine.requests import EngineCoreRequest, LoRARequest, PauseMode, SleepTag


def test_a_missing_tail_means_defaults() -> None:
    head: list[Any] = ["r", [1], None, {}, None, 1.5, None, None, None]
    request = msgspec.convert(head, EngineCoreRequest)
    assert (request.client_index, request.priority, request.abort_immediately) == (0, 0, False)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(head[:8], EngineCoreRequest)


def test_a_field_that_a_later_version_adds_is_ignored() -> None:
    head: list[Any] = ["r", [1], None, {}, None, 1.5, None, None, None]
    full = msgspec.to_builtins(msgspec.convert(head, EngineCoreRequest))
    assert len(full) == 20
    assert msgspec.convert([*full, "new"], EngineCoreRequest).request_id == "r"


def test_an_adapter_is_named_by_name_and_id() -> None:
    assert msgspec.convert(["a", 1], LoRARequest) == LoRARequest("a", 1)


def test_a_pause_mode_is_its_word() -> None:
    assert [str(mode) for mode in PauseMode] == ["abort", "wait", "keep"]
    with pytest.raises(ValueError, match="freeze"):
        PauseMode("freeze")


def test_a_sleep_tag_is_its_word() -> None:
    assert [str(tag) for tag in SleepTag] == ["weights", "kv_cache", "scheduling"]
