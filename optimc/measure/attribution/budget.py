"""What fits in the time there is: pairs go first, then requests, then whole comparisons from the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from optimc.measure.attribution.config import MIN_PAIRS
from optimc.measure.attribution.paired import ORDER
from optimc.measure.workload import Workload

MIN_REQUESTS = 8
"""Fewer leave a block's median to chance."""


@dataclass(frozen=True, slots=True)
class Cost:
    """A comparison that waits to be measured."""

    workload: Workload
    block_s: float
    """Seconds of one block with the workload as it is."""

    def seconds(self, pairs: int, most_requests: int | None) -> float:
        """Return what it takes with so many pairs and at most so many requests in a block; the warm-up stays."""
        before = self.workload.num_requests + self.workload.num_warmup_requests
        after = fewer_requests(self.workload, most_requests)
        share = (after.num_requests + after.num_warmup_requests) / before
        return pairs * len(ORDER) * self.block_s * share


@dataclass(frozen=True, slots=True)
class Fit:
    """How much is measured."""

    pairs: int
    most_requests: int | None
    """None: as many as asked for."""
    measured: int
    """Comparisons from the start that are measured; the others do not fit."""
    notes: tuple[str, ...] = ()
    """What was cut, in sentences."""

    def to_json(self) -> dict[str, Any]:
        """Return all fields."""
        return {**asdict(self), "notes": list(self.notes)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Fit:
        """Inverse of `to_json`. Raises KeyError or TypeError on anything else."""
        return cls(**{**data, "notes": tuple(data["notes"])})


def fit(costs: Sequence[Cost], pairs: int, budget_s: float) -> Fit:
    """Return the most that fits in `budget_s`, cutting in the stated order and saying so."""
    notes = []

    def total(pairs: int, most: int | None, count: int = len(costs)) -> float:
        return sum(cost.seconds(pairs, most) for cost in costs[:count])

    kept = next((n for n in range(pairs, MIN_PAIRS - 1, -1) if total(n, None) <= budget_s), min(pairs, MIN_PAIRS))
    if kept < pairs:
        notes.append(f"budget: {kept} pairs instead of {pairs}")
    if total(kept, None) <= budget_s:
        return Fit(kept, None, len(costs), tuple(notes))
    asked = max((cost.workload.num_requests for cost in costs), default=MIN_REQUESTS)
    most = next((n for n in range(asked, MIN_REQUESTS, -1) if total(kept, n) <= budget_s), MIN_REQUESTS)
    if most < asked:
        notes.append(f"budget: at most {most} requests per block instead of {asked}")
    count = next((n for n in range(len(costs), -1, -1) if total(kept, most, n) <= budget_s), 0)
    if count < len(costs):
        notes.append(f"budget: {len(costs) - count} of {len(costs)} comparisons are not measured, from the end")
    return Fit(kept, most, count, tuple(notes))


def fewer_requests(workload: Workload, most: int | None) -> Workload:
    """Return the workload with at most so many requests, never fewer than its clients, nor more than it had."""
    if most is None:
        return workload
    requests = min(workload.num_requests, max(most, workload.concurrency))
    return replace(workload, requests=requests)
