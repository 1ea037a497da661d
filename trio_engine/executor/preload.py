"""Maps torch's largest library before torch is imported, while other threads run on.

Layer: executor. No torch here.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os

# An import maps a library with the interpreter's lock held: nothing notices a signal or the
# owner's end meanwhile. Nearly all of torch's mapping is this file's (0.4 GB; 0.3 s on an idle
# machine whose page cache has it, seconds on a slow disk).
_LIBRARY = "libtorch_cpu.so"


def preload_torch() -> bool:
    """Maps torch's main library, without the interpreter's lock.

    Call it just before torch is imported, from a thread that may wait. The import then finds the
    library mapped, or maps it itself where this could not.

    Returns:
        Whether it is mapped.
    """
    path = _library_path()
    if path is None:
        return False
    # A foreign function runs without the lock, other than the loader that ``ctypes`` has itself.
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.argtypes, dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    return bool(dlopen(os.fsencode(path), os.RTLD_NOW))


def _library_path() -> str | None:
    spec = importlib.util.find_spec("torch")
    for folder in (spec and spec.submodule_search_locations) or ():
        path = os.path.join(folder, "lib", _LIBRARY)
        if os.path.exists(path):
            return path
    return None
