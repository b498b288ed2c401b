"""How many blocks a KV pool of so much memory has, and whether all of it may be taken at once."""

from __future__ import annotations

import os
from pathlib import Path

from optimc.errors import PlanTargetError


def check_pool_memory(path: Path, memory_bytes: int, bytes_per_block: int, block_size: int) -> int:
    """Return the number of blocks P. Raises PlanTargetError if it is 0 or the machine has less memory than that.

    The system promises more memory than there is, and ends the process when the pool fills.
    """
    num_blocks = memory_bytes // bytes_per_block
    if num_blocks < 1:
        raise PlanTargetError(
            f"{path}: a KV pool of {memory_bytes:,} bytes holds no block; "
            f"one block of {block_size} tokens takes {bytes_per_block:,} bytes, raise kv_memory"
        )
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if memory_bytes > physical:
        raise PlanTargetError(
            f"{path}: a KV pool of {memory_bytes:,} bytes exceeds this machine's {physical:,}; lower kv_memory"
        )
    return num_blocks


def may_populate(pool_bytes: int, root: Path = Path("/")) -> bool:
    """Return whether twice the pool is free now, for the whole machine and for this process's control group.

    A pool that was given more memory than that may never fill; taken at once it might end a neighbour, or this process.
    `root` is where proc/ and sys/ hang. What cannot be read is no limit, except the machine's memory.
    """
    available = _available_bytes(root)
    return available is not None and 2 * pool_bytes <= available


def _available_bytes(root: Path) -> int | None:
    lines = _text(root / "proc/meminfo").splitlines()
    found = next((line.split() for line in lines if line.startswith("MemAvailable:")), None)
    if found is None:
        return None
    available = int(found[1]) * 1024
    group = root / "sys/fs/cgroup"
    limit, used = _text(group / "memory.max").strip(), _text(group / "memory.current").strip()
    if limit.isdecimal() and used.isdecimal():
        available = min(available, int(limit) - int(used))
    return available


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.is_file() else ""
