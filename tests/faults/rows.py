"""Tests that are parametrized by rows of the table."""

from __future__ import annotations

import pytest

from tests.faults.matrix import MATRIX, Promise, Side


def faults(*sides: Side, promise: Promise | None = None) -> pytest.MarkDecorator:
    """Parametrizes a test by the rows of some sides, and of one promise where there are several."""
    rows = [
        row for row in MATRIX if row.side in sides and (promise is None or row.promise is promise)
    ]
    assert rows
    return pytest.mark.parametrize(
        "fault",
        [
            pytest.param(
                row,
                id=f"{row.side.name}-{row.moment.name}-{row.means.name}".lower(),
                marks=[pytest.mark.soak] if row.is_soak else [],
            )
            for row in rows
        ],
    )
