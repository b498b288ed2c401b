"""Sequences in sorted order, a trie read from left to right: neighbours have the longest prefixes in common."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Units = NDArray[np.int32]
"""Tokens or code points, [n], not negative."""

_CHUNK = 256
"""Units of each sequence that are compared at a time: sorting takes memory for these, not for whole sequences."""


def common_prefix(a: Units, b: Units) -> int:
    """Return how many units `a` and `b` begin with in common."""
    size = min(len(a), len(b))
    start = 0
    while start < size:  # most differ early or never, so a chunk is looked at before the rest
        end = min(size, start + max(_CHUNK, start))
        differs = a[start:end] != b[start:end]
        first = int(differs.argmax())
        if differs[first]:
            return start + first
        start = end
    return size


def sorted_order(sequences: Sequence[Units]) -> list[int]:
    """Return indices in lexicographic order; a prefix comes before what it begins, equals in order of index."""
    return _sorted(sequences, list(range(len(sequences))), 0)


def _sorted(sequences: Sequence[Units], indices: list[int], offset: int) -> list[int]:
    keys = {index: sequences[index][offset : offset + _CHUNK].astype(">i4").tobytes() for index in indices}
    order = sorted(indices, key=keys.__getitem__)
    if offset + _CHUNK >= max((len(sequences[index]) for index in indices), default=0):
        return order
    result: list[int] = []
    start = 0
    while start < len(order):
        end = start + 1
        while end < len(order) and keys[order[end]] == keys[order[start]]:
            end += 1
        run = order[start:end]
        result += run if len(run) == 1 else _sorted(sequences, run, offset + _CHUNK)
        start = end
    return result


def longest_earlier_prefixes(sequences: Sequence[Units]) -> tuple[list[int], list[int | None]]:
    """Return for each sequence how many of its first units an earlier one begins with, and which; None if none does.

    Sequences leave the sorted order latest first: whoever stands beside the leaving one came before it, and of all who
    did, has most in common with it.
    """
    order = sorted_order(sequences)
    count = len(order)
    place = {index: at for at, index in enumerate(order)}
    with_left = [0, *(common_prefix(sequences[a], sequences[b]) for a, b in pairwise(order))]
    left, right = list(range(-1, count - 1)), list(range(1, count + 1))
    lengths = [0] * count
    partners: list[int | None] = [None] * count
    for index in range(count - 1, -1, -1):
        at = place[index]
        before, after = left[at], right[at]
        of_before = with_left[at] if before >= 0 else 0
        of_after = with_left[after] if after < count else 0
        lengths[index] = max(of_before, of_after)
        if lengths[index]:
            partners[index] = order[before] if of_before >= of_after else order[after]
        if after < count:
            with_left[after] = min(of_before, of_after)
            left[after] = before
        if before >= 0:
            right[before] = after
    return lengths, partners
