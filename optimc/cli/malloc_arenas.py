"""How many arenas the C library's allocator spreads a process's threads over."""

from __future__ import annotations

import ctypes

_M_ARENA_MAX = -8
"""Of glibc's malloc.h."""
ARENAS = 2


def limit_arenas() -> None:
    """Keep glibc's malloc to two arenas; other C libraries are left as they are.

    glibc gives every thread an arena of its own, up to eight per core, and memory freed in one is no use to another. A
    server's threads each keep what their largest moment took: over half an hour of mixed requests resident memory rose
    by 3.2 ± 0.4 MB in ten minutes, with two arenas by 0.2 ± 0.1 (benchmarks/serving_soak.py). Call it before threads start.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, ARENAS)
