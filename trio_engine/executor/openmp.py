"""How long torch's threads spin before they sleep, settled before torch is imported.

Layer: executor. No torch here.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

# A decode step is some 300 parallel sections. By default a thread that waits for another spins for
# milliseconds, also when that one cannot run because this very spin has its core; a thread that has
# gone to sleep takes long to wake. Measured with torch 2.13 on 2 cores of Intel, with one float32
# request of 135M parameters, a step over the time to read the weights, by 1,000, 5,000, 7,000 and
# 10,000 spins (default: as the last): idle machine 1.5, 1.25, 1.2, 1.2; in ms beside one busy
# process 57-67, 75-79, 87-92, 98-106. A spin's length depends on the processor: on one of AMD the
# default took 241 ms beside one busy process and 1,745 beside two; 1,000 spins took 115 and 272.
_SPIN_COUNT = "7000"
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
