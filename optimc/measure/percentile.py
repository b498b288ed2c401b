"""Percentiles that carry their sample count, and hold their tongue when the sample is too small."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MIN_SAMPLES_P99 = 300
"""Fewer samples than this leave p99 to one to three values, which differ by tens of percent from run to run."""


def percentile(values: Sequence[float], q: float) -> float:
    """Return the q-th percentile (0 <= q <= 100) of at least one value, interpolating linearly between order
    statistics: rank q/100 * (n - 1), counted from 0 (Hyndman and Fan 1996, type 7)."""
    assert len(values) > 0, "a percentile needs a value"
    assert 0 <= q <= 100, f"q must be in [0, 100], got {q}"
    ordered = sorted(values)
    rank = q / 100 * (len(ordered) - 1)
    below = int(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Percentiles of `n` samples, in the samples' unit. None where there is no honest value."""

    p50: float | None
    p90: float | None
    p99: float | None
    """None below MIN_SAMPLES_P99 samples."""
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Distribution:
        """Summarize the values; without any, every percentile is None."""
        if not values:
            return cls(None, None, None, 0)
        p99 = percentile(values, 99) if len(values) >= MIN_SAMPLES_P99 else None
        return cls(percentile(values, 50), percentile(values, 90), p99, len(values))

    def to_json(self) -> dict[str, float | int | None]:
        """Return the four fields by name."""
        return {"p50": self.p50, "p90": self.p90, "p99": self.p99, "n": self.n}

    def cells(self, format_spec: str = ",.1f") -> tuple[str, str, str, str]:
        """Return p50, p90, p99 and n as table cells; a withheld value says how many samples there were."""
        shown = [f"n/a (n={self.n})" if v is None else format(v, format_spec) for v in (self.p50, self.p90, self.p99)]
        return shown[0], shown[1], shown[2], str(self.n)
