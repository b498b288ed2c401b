"""How often heads are right, and how far what they believe of themselves is to be believed.

Letters: N positions, K heads, R ranks, V' draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from optimc.plan import HeadAccuracy
from optimc_passes.heads.config import MOST_RANKS
from optimc_passes.heads.heads import DRAFT_VOCAB, Heads
from optimc_passes.heads.positions import Positions
from optimc_passes.heads.reference import head_logits
from optimc_passes.weights import Dense

ALL = "all"
_BATCH = 256
_KNOTS = 16
"""Most knots of a confidence curve."""
_ASKED_RANKS = 4
"""Guesses of a position that count for confidence: the later ones are next to never right."""
_TIE = 1e-6

Knots = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Guesses:
    """What heads guessed at measured positions, and what came."""

    kinds: NDArray[np.str_]
    """[N]"""
    ranks: NDArray[np.int64]
    """[N, K] place of the right token among the first R guesses; R: not among them, R + 1: there was no such token."""
    logprobs: NDArray[np.float32]
    """[N, K, R] of the guesses, likeliest first."""

    def parents_right(self, head: int) -> NDArray[np.bool_]:
        """Return where a head's guess is asked for, and known to be right or wrong: the first guesses of the heads
        before it were right."""
        asked: NDArray[np.bool_] = (self.ranks[:, :head] == 0).all(axis=1) & (self.ranks[:, head] <= MOST_RANKS)
        return asked


def guess(heads: Heads, positions: Positions, lm_head: NDArray[np.float32] | None) -> Guesses:
    """Let the heads guess at all positions, with their weights as they are stored."""
    info = heads.info
    vocabulary = heads.weights.get(DRAFT_VOCAB)
    ids = None if vocabulary is None else _read(vocabulary)
    ranks = np.full((len(positions), info.num_heads), MOST_RANKS, np.int64)
    logprobs = np.zeros((len(positions), info.num_heads, MOST_RANKS), np.float32)
    for start in range(0, len(positions), _BATCH):
        rows = np.arange(start, min(start + _BATCH, len(positions)))
        hidden, embedded = positions.inputs(rows)
        logits = head_logits(heads, lm_head, hidden, embedded if info.conditioned else None)
        top = _top(logits, MOST_RANKS)
        picked = np.take_along_axis(logits, top, axis=2)
        logprobs[rows, :, : top.shape[2]] = picked - _log_sum_exp(logits)
        tokens = top if ids is None else ids[top]
        came = positions.next_tokens(rows, info.num_heads)
        hit = tokens == came[:, :, None]
        ranks[rows] = np.where(hit.any(axis=2), hit.argmax(axis=2), MOST_RANKS)
        ranks[rows] = np.where(came < 0, MOST_RANKS + 1, ranks[rows])
    return Guesses(positions.kinds, ranks, logprobs)


def accuracies(guesses: Guesses, *, quantized: bool) -> tuple[HeadAccuracy, ...]:
    """Return the share of right guesses of every head on every kind of text, and on all of it."""
    found = []
    for kind in [*sorted(set(guesses.kinds.tolist())), ALL]:
        here = guesses.kinds == kind if kind != ALL else np.ones(len(guesses.kinds), bool)
        for head in range(guesses.ranks.shape[1]):
            ranks = guesses.ranks[here & guesses.parents_right(head), head]
            shares = [float((ranks < rank).mean()) if len(ranks) else 0.0 for rank in range(1, MOST_RANKS + 1)]
            found.append(HeadAccuracy(head=head, kind=kind, top=tuple(shares), tokens=len(ranks), quantized=quantized))
    return tuple(found)


def shares_by_rank(measured: Sequence[HeadAccuracy]) -> list[list[float]]:
    """Return the probability [K][R] that a guess of each rank is right, over all text: what trees are made from.

    A head that nothing was measured of is never right.
    """
    return [np.diff([0.0, *entry.top]).tolist() for entry in measured if entry.kind == ALL]


def accepted_length(ranks: NDArray[np.int64]) -> float:
    """Return how many tokens a chain of first guesses gets accepted on average."""
    return float((ranks == 0).cumprod(axis=1).sum(axis=1).mean()) if len(ranks) else 0.0


def confidence(guesses: Guesses, head: int) -> Knots:
    """Return the probability that a guess is right by its log-probability: a rising curve through pooled guesses.

    Made of guesses of the first ranks, since servers verify no others.
    """
    asked = guesses.parents_right(head)
    ranks = guesses.ranks[asked, head]
    shown = guesses.logprobs[asked, head, :_ASKED_RANKS]
    right = (ranks[:, None] == np.arange(shown.shape[1])[None, :]).astype(np.float64)
    if shown.size == 0:
        return believed()
    return isotonic_knots(shown.ravel().astype(np.float64), right.ravel())


def believed() -> Knots:
    """Return the curve of heads that were not measured: a guess is right as often as it is thought to be."""
    points = [-8.0, -4.0, -3.0, -2.0, -1.5, -1.0, -0.7, -0.4, -0.2, -0.1, 0.0]
    return tuple((point, float(np.exp(point))) for point in points)


def isotonic_knots(x: NDArray[np.float64], y: NDArray[np.float64]) -> Knots:
    """Return knots of the rising function of x nearest to y in mean square (pool adjacent violators), few of them."""
    order = np.argsort(x, kind="stable")
    edges = np.array_split(np.arange(len(x)), min(len(x), 8 * _KNOTS))
    pools = [(float(x[order[part]].mean()), float(y[order[part]].mean()), float(len(part))) for part in edges]
    merged: list[tuple[float, float, float]] = []
    for place, share, weight in pools:
        merged.append((place, share, weight))
        while len(merged) > 1 and merged[-1][1] <= merged[-2][1]:
            (x1, y1, w1), (x0, y0, w0) = merged.pop(), merged.pop()
            total = w0 + w1
            merged.append(((x0 * w0 + x1 * w1) / total, (y0 * w0 + y1 * w1) / total, total))
    kept = [merged[round(place)] for place in np.linspace(0, len(merged) - 1, min(len(merged), _KNOTS))]
    knots: list[tuple[float, float]] = []
    for place, share, _ in kept:
        if not knots or (place > knots[-1][0] + _TIE and share > knots[-1][1]):
            knots.append((place, share))
    return tuple(knots)


def summary(measured: Sequence[HeadAccuracy]) -> Mapping[str, float]:
    """Return figures for a report: first guesses that are right, by kind of text and head."""
    return {f"head_{entry.head + 1}_{entry.kind}": entry.top[0] for entry in measured if entry.tokens}


def _top(logits: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Return the indices of the largest, largest first; of equals the lower index, as executors pick them."""
    count = min(count, logits.shape[2])
    some = np.argpartition(-logits, count - 1, axis=2)[:, :, :count]
    some.sort(axis=2)
    picked = np.take_along_axis(logits, some, axis=2)
    order: NDArray[np.int64] = np.take_along_axis(some, np.argsort(-picked, axis=2, kind="stable"), axis=2)
    return order


def _log_sum_exp(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    most = logits.max(axis=2, keepdims=True)
    result: NDArray[np.float32] = most + np.log(np.exp(logits - most).sum(axis=2, keepdims=True))
    return result


def _read(weight: object) -> NDArray[np.int64]:
    assert isinstance(weight, Dense)
    return weight.read().astype(np.int64)
