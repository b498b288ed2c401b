"""Spending a budget over units that each have a price list: bits or bytes against the divergence they cost.

Divergences are taken to add up. Each unit's options are reduced to the lower convex hull of (cost, divergence); walking
down all hulls at once in the order of the divergence saved per unit of cost passes through the best totals for any
budget (Lagrangian relaxation), and what is left of the budget at the end is filled greedily.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Option(Generic[T]):
    """One way to store a unit."""

    what: T
    cost: float
    """Bits or bytes, at least 0."""
    divergence: float
    """Predicted KL divergence in nats per token that this unit adds, at least 0."""


@dataclass(frozen=True)
class Point:
    """A total the sweep passed through."""

    cost: float
    divergence: float
    picks: tuple[int, ...]
    """For each unit the index of its option."""


@dataclass(frozen=True)
class Allocation:
    """What to do with each unit, and what else could have been done."""

    chosen: Point
    frontier: tuple[Point, ...]
    """By rising cost, falling divergence; the chosen point is one of them."""


def allocate(units: Sequence[Sequence[Option[T]]], budget: float) -> Allocation | None:
    """Pick an option of each unit so that costs stay within `budget` and divergences are least.

    Return None if even the cheapest options cost more. Equal cases are decided by the order of units and options.
    """
    assert all(units), "a unit has no options"
    hulls = [_hull(options) for options in units]
    at = [0] * len(units)
    cost = sum(options[hull[0]].cost for options, hull in zip(units, hulls, strict=True))
    if cost > budget:
        return None
    sweep = [_point(units, hulls, at)]
    queue = [(-_saved(units[unit], hulls[unit], 0), unit) for unit in range(len(units)) if len(hulls[unit]) > 1]
    heapq.heapify(queue)
    best: list[int] | None = None
    while queue:
        _, unit = heapq.heappop(queue)
        step = _price(units[unit], hulls[unit], at[unit])
        if best is None and cost + step > budget:
            best = list(at)  # The sweep goes on for the frontier alone.
        at[unit] += 1
        cost += step
        sweep.append(_point(units, hulls, at))
        if at[unit] + 1 < len(hulls[unit]):
            heapq.heappush(queue, (-_saved(units[unit], hulls[unit], at[unit]), unit))
    picks = [hull[place] for hull, place in zip(hulls, best if best is not None else at, strict=True)]
    chosen = _total(units, _filled(units, picks, budget))
    frontier = [point for point in sweep if not _dominates(chosen, point) and point.picks != chosen.picks]
    return Allocation(chosen, tuple(sorted([*frontier, chosen], key=lambda point: point.cost)))


def thinned(allocation: Allocation, count: int) -> tuple[Point, ...]:
    """Return at most `count` points of the frontier, evenly spread over its costs, with its ends and the chosen one."""
    assert count >= 3
    points = allocation.frontier
    if len(points) <= count:
        return points
    low, high = points[0].cost, points[-1].cost
    wanted = [low + (high - low) * step / (count - 2) for step in range(count - 1)]
    kept = {min(points, key=lambda point: abs(point.cost - target)).cost for target in wanted} | {
        allocation.chosen.cost
    }
    return tuple(point for point in points if point.cost in kept)


def _hull(options: Sequence[Option[T]]) -> list[int]:
    """Return the options on the lower convex hull, by rising cost and falling divergence."""
    hull: list[int] = []
    for index in sorted(range(len(options)), key=lambda i: (options[i].cost, options[i].divergence, i)):
        new = options[index]
        if hull and new.divergence >= options[hull[-1]].divergence:
            continue
        while len(hull) > 1 and _slope(options[hull[-1]], new) <= _slope(options[hull[-2]], options[hull[-1]]):
            hull.pop()
        hull.append(index)
    return hull


def _slope(cheap: Option[T], dear: Option[T]) -> float:
    """Return how fast divergence falls as cost rises, as a negative number."""
    return (dear.divergence - cheap.divergence) / (dear.cost - cheap.cost)


def _saved(options: Sequence[Option[T]], hull: Sequence[int], place: int) -> float:
    return -_slope(options[hull[place]], options[hull[place + 1]])


def _price(options: Sequence[Option[T]], hull: Sequence[int], place: int) -> float:
    return options[hull[place + 1]].cost - options[hull[place]].cost


def _filled(units: Sequence[Sequence[Option[T]]], picks: list[int], budget: float) -> list[int]:
    """Improve single units, options off the hull included, while the budget has room; the largest gain first."""
    picks = list(picks)
    while True:
        room = budget - _total(units, picks).cost
        gains = [
            (units[unit][pick].divergence - option.divergence, -unit, -index)
            for unit, pick in enumerate(picks)
            for index, option in enumerate(units[unit])
            if option.divergence < units[unit][pick].divergence and option.cost - units[unit][pick].cost <= room
        ]
        if not gains:
            return picks
        _, unit, index = max(gains)
        picks[-unit] = -index


def _point(units: Sequence[Sequence[Option[T]]], hulls: Sequence[Sequence[int]], at: Sequence[int]) -> Point:
    return _total(units, [hull[place] for hull, place in zip(hulls, at, strict=True)])


def _total(units: Sequence[Sequence[Option[T]]], picks: Sequence[int]) -> Point:
    picked = [options[pick] for options, pick in zip(units, picks, strict=True)]
    return Point(sum(option.cost for option in picked), sum(option.divergence for option in picked), tuple(picks))


def _dominates(point: Point, other: Point) -> bool:
    return point.cost <= other.cost and point.divergence <= other.divergence
