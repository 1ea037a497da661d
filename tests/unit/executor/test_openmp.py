"""The setting of torch's threads is there while torch is imported, and then gone."""

from __future__ import annotations

import os

import pytest

from trio_engine.executor.openmp import short_spins


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)


def test_the_setting_holds_inside_only() -> None:
    with short_spins():
        assert int(os.environ["GOMP_SPINCOUNT"]) > 0
    assert "GOMP_SPINCOUNT" not in os.environ


def test_the_setting_goes_when_the_import_fails() -> None:
    with pytest.raises(ImportError), short_spins():
        raise ImportError
    assert "GOMP_SPINCOUNT" not in os.environ


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_what_the_user_set_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "active")
    before = dict(os.environ)
    with short_spins():
        assert dict(os.environ) == before
    assert dict(os.environ) == before
