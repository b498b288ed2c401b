"""Which of several points nobody beats."""

from __future__ import annotations

from collections.abc import Sequence


def pareto_front(points: Sequence[Sequence[float]]) -> list[bool]:
    """Return for each point whether it is on the Pareto front, every coordinate being a cost.

    A point is off the front if another is at most as large in every coordinate and smaller in one. Equal points are
    on it together.
    """
    return [not any(_dominates(other, point) for other in points) for point in points]


def _dominates(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(a <= b for a, b in zip(one, other, strict=True)) and any(a < b for a, b in zip(one, other, strict=True))
