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
# gone to sleep takes long to wake. Measured with torch 2.13 on 2 cores, ms a step of one float32
# request of 135M parameters, spinning 1,000 times, 10,000, and 300,000: idle machine 36, 27, 27;
# beside one busy process 54, 95, 95. How long a spin is depends on the processor: on another the
# default took 241 beside one busy process and 1,745 beside two, where 1,000 took 115 and 272.
_SPIN_COUNT = "10000"
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
