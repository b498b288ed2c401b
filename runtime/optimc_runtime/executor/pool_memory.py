"""How many blocks a KV pool of so much memory has, and whether all of it may be taken at once."""

from __future__ import annotations

import os
from pathlib import Path

from optimc.errors import PlanTargetError
from optimc_runtime.executor.available_memory import available_bytes, limit_bytes


def check_pool_memory(
    path: Path, memory_bytes: int, bytes_per_block: int, block_size: int, root: Path = Path("/")
) -> int:
    """Return the number of blocks P. Raises PlanTargetError if it is 0, or if the machine or this process's control
    group has less memory than that.

    The system promises more memory than there is, and ends the process when the pool fills. `root` is where sys/ hangs.
    """
    num_blocks = memory_bytes // bytes_per_block
    if num_blocks < 1:
        raise PlanTargetError(
            f"{path}: a KV pool of {memory_bytes:,} bytes holds no block; "
            f"one block of {block_size} tokens takes {bytes_per_block:,} bytes, raise kv_memory"
        )
    most, whose = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "this machine's"
    limit = limit_bytes(root / "sys/fs/cgroup")
    if limit is not None and limit < most:
        most, whose = limit, "this control group's"
    if memory_bytes > most:
        raise PlanTargetError(f"{path}: a KV pool of {memory_bytes:,} bytes exceeds {whose} {most:,}; lower kv_memory")
    return num_blocks


def may_populate(pool_bytes: int, root: Path = Path("/")) -> bool:
    """Return whether twice the pool is free now, for the whole machine and for this process's control group.

    A pool that was given more memory than that may never fill; taken at once it might end a neighbour, or this process.
    `root` is where proc/ and sys/ hang. What cannot be read is no limit, except the machine's memory.
    """
    available = available_bytes(root / "proc/meminfo", root / "sys/fs/cgroup")
    return available is not None and 2 * pool_bytes <= available
