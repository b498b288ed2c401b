"""Copies rows between pools and step tensors: all layers' keys, values and scales in one launch.

Importing this file imports Triton. Both kernels take, for N tensors and R rows,

    pool_ptrs  int64 [N]   device addresses of pools, each with rows of `row_bytes[n]` bytes
    row_ptrs   int64 [N]   device addresses of tensors [R, row_bytes[n]]: the step's rows, or a staging area
    row_bytes  int32 [N]   multiples of 2
    slots      int64 [R]   pool row that belongs to row r; -1 leaves row r alone (padding)
    rows       int32       R

and are launched on a grid of (N, any number up to R): programs stride over rows, so one captured launch serves any R.
All tensors must start at multiples of 16 bytes; rows named twice are written twice, in no particular order. A move
whose sources and destinations overlap is `gather_rows` into a staging area, then `scatter_rows` out of it, which is
`commit_rows` under another name.
"""

# Triton's language has types of its own, and compile-time constants are upper case there.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

WIDE_BYTES: tl.constexpr = tl.constexpr(16)
"""What one thread moves at once, where rows are multiples of it."""


@triton.jit
def _copy(src, dst, row_bytes, BLOCK_BYTES: tl.constexpr):
    """Copy `row_bytes` bytes, in pieces of 16 bytes a thread where both ends allow it, of 2 elsewhere."""
    if row_bytes % WIDE_BYTES == 0:
        wide_src = tl.multiple_of(src.to(tl.pointer_type(tl.int32)), WIDE_BYTES)
        wide_dst = tl.multiple_of(dst.to(tl.pointer_type(tl.int32)), WIDE_BYTES)
        num_words = tl.multiple_of(row_bytes // 4, 4)
        for first in range(0, num_words, BLOCK_BYTES // 4):
            word = first + tl.arange(0, BLOCK_BYTES // 4)
            tl.store(wide_dst + word, tl.load(wide_src + word, mask=word < num_words), mask=word < num_words)
    else:
        narrow_src = src.to(tl.pointer_type(tl.int16))
        narrow_dst = dst.to(tl.pointer_type(tl.int16))
        for first in range(0, row_bytes // 2, BLOCK_BYTES // 2):
            half = first + tl.arange(0, BLOCK_BYTES // 2)
            inside = half < row_bytes // 2
            tl.store(narrow_dst + half, tl.load(narrow_src + half, mask=inside), mask=inside)


@triton.jit
def commit_rows(pool_ptrs, row_ptrs, row_bytes, slots, rows, BLOCK_BYTES: tl.constexpr):
    """Row r of tensor n goes to row slots[r] of pool n."""
    tensor = tl.program_id(0)
    pool, source = tl.load(pool_ptrs + tensor), tl.load(row_ptrs + tensor)
    size = tl.load(row_bytes + tensor)
    for row in range(tl.program_id(1), rows, tl.num_programs(1)):
        slot = tl.load(slots + row)
        if slot >= 0:
            _copy(source + row * size.to(tl.int64), pool + slot * size, size, BLOCK_BYTES)


@triton.jit
def gather_rows(pool_ptrs, row_ptrs, row_bytes, slots, rows, BLOCK_BYTES: tl.constexpr):
    """Row slots[r] of pool n goes to row r of tensor n."""
    tensor = tl.program_id(0)
    pool, target = tl.load(pool_ptrs + tensor), tl.load(row_ptrs + tensor)
    size = tl.load(row_bytes + tensor)
    for row in range(tl.program_id(1), rows, tl.num_programs(1)):
        slot = tl.load(slots + row)
        if slot >= 0:
            _copy(pool + slot * size, target + row * size.to(tl.int64), size, BLOCK_BYTES)
