"""Requests that are alike where the cache could not see it.

A request is a near miss if text that an earlier one held too lies beyond all that it shares with any earlier prefix.
Text is recognised by its shingles: runs of eight tokens' letters, one in eight of which is kept. What fewer than
three requests hold is somebody's own text and does not count, so a long question hides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from optimc.measure.prefix.folded import fold, window_hashes
from optimc.measure.prefix.rendered import CHARS_PER_TOKEN, Rendered

MIN_REQUESTS = 3
MIN_NEAR_MISSES = 2
_SHINGLE_TOKENS = 8
_SAMPLED = np.uint64(8)
_LOOKED_AT_TOKENS = 4096
_MISSED_ANCHORS = 4
"""Sampled shingles beyond the shared prefix that make a near miss: two blocks of 16 tokens hold nine on average."""
_ROWS, _BANDS = 4, 16
_ALIKE = 0.6
"""Share of equal min-hashes, an estimate of the overlap of two requests' shared shingles."""


@dataclass(frozen=True, slots=True)
class Family:
    """Requests that hold the same text, by index in order of arrival."""

    members: tuple[int, ...]
    near_misses: frozenset[int]


def find_families(requests: Sequence[Rendered], shared_chars: Sequence[int]) -> list[Family]:
    """Return the families with near misses. `shared_chars` of each request: of its text, how much an earlier one begins
    with."""
    anchors = [_anchors(request, shared) for request, shared in zip(requests, shared_chars, strict=True)]
    hashes = np.concatenate([hashes for hashes, _ in anchors]) if anchors else np.zeros(0, np.uint64)
    beyond = np.concatenate([flags for _, flags in anchors]) if anchors else np.zeros(0, bool)
    owner = np.repeat(np.arange(len(requests)), [len(hashes) for hashes, _ in anchors])
    if not len(hashes):
        return []
    _, first, inverse, support = np.unique(hashes, return_index=True, return_inverse=True, return_counts=True)
    is_shared = support[inverse] >= MIN_REQUESTS
    is_missed = is_shared & beyond & (owner[first[inverse]] < owner)
    missed = np.bincount(owner[is_missed], minlength=len(requests))
    near = {int(index) for index in np.flatnonzero(missed >= _MISSED_ANCHORS)}
    if len(near) < MIN_NEAR_MISSES:
        return []
    return _grouped(hashes[is_shared], owner[is_shared], near)


def _anchors(request: Rendered, shared_chars: int) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """Return the sampled shingles of a request, each once, and whether they lie beyond what it shares."""
    per_token = 1 if request.starts is None and not request.is_estimated else CHARS_PER_TOKEN
    folded = fold(request.text[: _LOOKED_AT_TOKENS * per_token])
    hashes = window_hashes(folded.codes, _SHINGLE_TOKENS * per_token)
    sampled = np.flatnonzero(hashes % _SAMPLED == 0)
    # Of a shingle that occurs twice the last place counts: reversed, it is the first that `unique` meets.
    unique, last = np.unique(hashes[sampled[::-1]], return_index=True)
    places = sampled[::-1][last]
    return unique, places >= folded.index(shared_chars)


def _grouped(hashes: NDArray[np.uint64], owner: NDArray[np.int64], near: set[int]) -> list[Family]:
    """Return the families among the owners of these shingles, given in order of owner."""
    owners, starts = np.unique(owner, return_index=True)
    draw = np.random.default_rng(0)
    signature = np.empty((len(owners), _ROWS * _BANDS), np.uint64)
    for row in range(_ROWS * _BANDS):
        factor, offset = (int(draw.integers(1, 1 << 62)) for _ in range(2))
        mixed = hashes * np.uint64(2 * factor + 1) + np.uint64(offset)
        mixed ^= mixed >> np.uint64(31)
        mixed *= np.uint64(0x94D049BB133111EB)
        signature[:, row] = np.minimum.reduceat(mixed, starts)
    parent = list(range(len(owners)))

    def root(at: int) -> int:
        while parent[at] != at:
            parent[at] = parent[parent[at]]
            at = parent[at]
        return at

    for band in range(_BANDS):
        rows = np.ascontiguousarray(signature[:, band * _ROWS : (band + 1) * _ROWS])
        order = np.lexsort(rows.T)
        same = (rows[order[1:]] == rows[order[:-1]]).all(axis=1)
        left, right = order[:-1][same], order[1:][same]
        alike = (signature[left] == signature[right]).mean(axis=1) >= _ALIKE
        for a, b in zip(left[alike].tolist(), right[alike].tolist(), strict=True):
            parent[root(a)] = root(b)
    members: dict[int, list[int]] = {}
    for at, index in enumerate(owners.tolist()):
        members.setdefault(root(at), []).append(index)
    families = [Family(tuple(group), frozenset(near.intersection(group))) for group in members.values()]
    kept = [f for f in families if len(f.members) >= MIN_REQUESTS and len(f.near_misses) >= MIN_NEAR_MISSES]
    return sorted(kept, key=lambda family: family.members)
