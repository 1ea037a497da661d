"""How long torch's threads spin before they sleep, settled before torch is imported.

Layer: executor. No torch here.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

# A decode step is some 500 parallel sections. By default a thread that waits for another spins for
# milliseconds, also when that one cannot run because this very spin has its core. Measured with
# torch 2.13 on 2 cores, ms a step of one float32 request of 135M parameters, by default and with
# this: idle machine 78 and 84, beside one busy process 241 and 115, beside two 1,745 and 272.
_SPIN_COUNT = "1000"
_SETTINGS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


@contextmanager
def short_spins() -> Iterator[None]:
    """Import torch in this block: the OpenMP library of its CPU builds reads the setting then.

    Does nothing if the environment says how to wait, and leaves the environment as it was.
    """
    if any(name in os.environ for name in _SETTINGS):
        yield
        return
    os.environ["GOMP_SPINCOUNT"] = _SPIN_COUNT
    try:
        yield
    finally:
        del os.environ["GOMP_SPINCOUNT"]
