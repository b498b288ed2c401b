"""Where buffers lie: in one arena, the same bytes for values that are never needed together.

Letters: C features of a quantized row, g groups in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from optimc.plan.cpu_program import ALIGNMENT, padded_features
from optimc_passes.emit.cpu.draft import Draft, FloatRows, QuantizedRows
from optimc_passes.emit.cpu.operands import buffers_read, buffers_written, reading_ends


class Lifetime(NamedTuple):
    """A buffer's size, and the first and last operation that touches it."""

    nbytes: int
    first: int
    last: int


class Placement(NamedTuple):
    """Where each buffer lies, in bytes from the start of the arena, and how large that is."""

    offsets: list[int]
    arena_bytes: int


def buffer_bytes(buffer: FloatRows | QuantizedRows, max_tokens: int) -> int:
    """Return the room a buffer takes, its parts aligned, for the most rows a step may have."""
    if isinstance(buffer, FloatRows):
        return _aligned(4 * buffer.width * max_tokens)
    rows = buffer.terms * max_tokens
    groups = -(-buffer.features // buffer.group)
    return _aligned(rows * padded_features(buffer.features, buffer.group)) + 2 * _aligned(4 * groups * rows)


def lifetimes(draft: Draft, max_tokens: int) -> dict[int, Lifetime]:
    """Return the lifetime of every buffer that some operation touches, until it has been read by all threads.

    Answers live to the end.
    """
    found: dict[int, Lifetime] = {}
    ends = reading_ends(draft.ops)
    touched = [(buffers_read(op) | buffers_written(op), end) for op, end in zip(draft.ops, ends, strict=True)]
    for place, (buffers, end) in enumerate([*touched, ({answer.buffer for answer in draft.answers}, len(draft.ops))]):
        for buffer in buffers:
            earlier = found.get(buffer, Lifetime(buffer_bytes(draft.buffers[buffer], max_tokens), place, end))
            found[buffer] = earlier._replace(last=max(earlier.last, end))
    return found


def place_buffers(buffers: Sequence[Lifetime]) -> Placement:
    """Give each buffer the lowest place at which it meets no other while both live, the largest first."""
    offsets = [0] * len(buffers)
    placed: list[int] = []
    for index in sorted(range(len(buffers)), key=lambda i: (-buffers[i].nbytes, buffers[i].first)):
        mine = buffers[index]
        together = sorted(
            (offsets[other], offsets[other] + buffers[other].nbytes)
            for other in placed
            if buffers[other].first <= mine.last and mine.first <= buffers[other].last
        )
        offset = 0
        for start, stop in together:
            if offset + mine.nbytes <= start:
                break
            offset = max(offset, stop)
        offsets[index] = offset
        placed.append(index)
    end = max((offset + buffer.nbytes for offset, buffer in zip(offsets, buffers, strict=True)), default=0)
    return Placement(offsets, end)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
