"""How many threads suit this machine."""

from __future__ import annotations

import os
from pathlib import Path


def usable_cores() -> int:
    """Return the number of physical cores this process may run on; one thread per core suits kernels that fill it."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    cpus = os.sched_getaffinity(0)
    siblings = set()
    for cpu in cpus:
        listing = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            siblings.add(listing.read_text("utf-8"))
        except OSError:
            return len(cpus)
    return len(siblings)
