"""How many blocks a KV pool of so much memory has."""

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
