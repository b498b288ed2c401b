"""Keeps the C library's allocator from holding memory that a server has long given back."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_M_ARENA_MAX = -8
"""Of glibc's malloc.h."""
ARENAS = 2
TRIM_EVERY_S = 30.0


def limit_arenas() -> None:
    """Keep glibc's malloc to two arenas; other C libraries are left as they are. Call it before threads start.

    glibc gives every thread an arena of its own, up to eight per core, and memory freed in one is no use to another: a
    server's threads each keep what their largest moment took.
    """
    mallopt = _function("mallopt")
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, ARENAS)


@contextmanager
def trimming(every_s: float = TRIM_EVERY_S) -> Iterator[None]:
    """Give free pages back to the system now and then, on a thread of its own; without glibc nothing happens.

    Pages between others that are in use stay resident otherwise. Over half an hour of mixed requests that made 9 MB,
    which looked like a leak; giving them back takes a few milliseconds (benchmarks/serving_soak.py).
    """
    trim = _function("malloc_trim")
    if trim is None:
        yield
        return
    ended = threading.Event()

    def work() -> None:
        while not ended.wait(every_s):
            trim(ctypes.c_size_t(0))  # without the interpreter's lock

    thread = threading.Thread(target=work, name="optimc-trim", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _function(name: str) -> ctypes._NamedFuncPointer | None:
    return getattr(ctypes.CDLL(None), name, None)
