"""The memory of a process that starts and then serves for long."""

from __future__ import annotations

import atexit
import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def start_up() -> Iterator[None]:
    """Load what stays, inside: garbage is not looked for meanwhile, nor ever again among what was loaded (looking
    stops the engine for tens of milliseconds), and memory that only loading needed is given back."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)  # else native objects would look leaked at exit
    # glibc keeps what is freed: after reading a tokenizer, tens of megabytes.
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
