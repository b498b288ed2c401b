"""The only place with statistics: intervals of figures, and ratios of paired measurements.

No interval is worth anything without its number of values and its method; both travel with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from optimc.measure.percentile import MIN_SAMPLES_P99

Method = Literal["t", "bootstrap", "order"]

# Two-sided 95% points of Student's t for 1 .. 30 degrees of freedom; beyond, the normal's 1.960 is 4% off at most.
_T95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
_NORMAL95 = 1.960

_RESAMPLES = 1000


@dataclass(frozen=True, slots=True)
class Interval:
    """Where the true value lies in 95 of 100 cases, and how that was found."""

    low: float
    high: float
    n: int
    """Values it rests on."""
    method: Method
    level: float = 0.95

    def to_json(self) -> dict[str, Any]:
        """Return all fields."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Interval:
        """Read what `to_json` gave."""
        return cls(**data)


def t_interval(values: Sequence[float]) -> Interval | None:
    """Return Student's interval of the mean; None for fewer than 3 values."""
    n = len(values)
    if n < 3:
        return None
    mean = math.fsum(values) / n
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    t = _T95[n - 2] if n - 1 <= len(_T95) else _NORMAL95
    half = t * deviation / math.sqrt(n)
    return Interval(mean - half, mean + half, n, "t")


def bootstrap_interval(values: Sequence[float], q: float, seed: int = 0) -> Interval | None:
    """Return the interval of the `q`-th percentile within one run; None for fewer than 20 values.

    `values` stand in the order of sending. Neighbours in time are alike (they met the same queue), so that whole
    blocks of ceil(n^(1/3)) are drawn; a plain bootstrap would take them for independent and come out too narrow.
    """
    n = len(values)
    if n < 20:
        return None
    block = math.ceil(round(n ** (1 / 3), 9))  # rounded: the cube root of 27 is 3.0000000000000004 or less by platform
    data = np.asarray(values, np.float64)
    starts = np.random.default_rng(seed).integers(0, n, (_RESAMPLES, math.ceil(n / block)))
    # Blocks wrap around, or the first and last values would be drawn less often than the others.
    rows = ((starts[:, :, None] + np.arange(block)) % n).reshape(_RESAMPLES, -1)[:, :n]
    low, high = np.percentile(np.percentile(data[rows], q, axis=1), [2.5, 97.5])
    return Interval(float(low), float(high), n, "bootstrap")


def order_interval(values: Sequence[float], q: float) -> Interval | None:
    """Return the interval of the `q`-th percentile between two of the sorted values.

    Ranks come from the binomial distribution of "how many lie below". None when the values do not reach far enough:
    no rank above the percentile keeps the level, or fewer than the samples that p99 needs.
    """
    n, share = len(values), q / 100
    if n < (MIN_SAMPLES_P99 if q >= 99 else 2) or not 0 < share < 1:
        return None
    # cumulative[k] = P(at most k of n lie below)
    logs = [
        math.lgamma(n + 1)
        - math.lgamma(k + 1)
        - math.lgamma(n - k + 1)
        + k * math.log(share)
        + (n - k) * math.log1p(-share)
        for k in range(n + 1)
    ]
    cumulative = np.cumsum(np.exp(logs))
    lower = int(np.searchsorted(cumulative, 0.025, side="right"))  # P(fewer than `lower` below) <= 2.5%
    upper = int(np.searchsorted(cumulative, 0.975, side="left")) + 1  # P(at least `upper` below) <= 2.5%
    if lower < 1 or upper > n:
        return None
    ordered = sorted(values)
    return Interval(float(ordered[lower - 1]), float(ordered[upper - 1]), n, "order")


def percentile_interval(values: Sequence[float], q: float) -> Interval | None:
    """Return the interval of a percentile within one run, `values` in the order of sending.

    p99 goes by order statistics: resampling cannot make values beyond the largest, so its tail would be too short.
    """
    return order_interval(values, q) if q >= 99 else bootstrap_interval(values, q)


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times as large one quantity is as another, from pairs that were measured together."""

    value: float
    interval: Interval | None
    """None for fewer than 3 pairs."""
    pairs: int

    @property
    def excludes_one(self) -> bool:
        """Whether the two differ: the interval exists and does not hold 1."""
        return self.interval is not None and not self.interval.low <= 1 <= self.interval.high

    def to_json(self) -> dict[str, Any]:
        """Return value, low, high and pairs; low and high are None without an interval."""
        low, high = (self.interval.low, self.interval.high) if self.interval else (None, None)
        return {"value": self.value, "low": low, "high": high, "pairs": self.pairs}

    def __str__(self) -> str:
        if self.interval is None:
            return f"x{self.value:.3g} (n={self.pairs}, too few for an interval)"
        verdict = "" if self.excludes_one else "no difference seen, "
        return f"x{self.value:.3g} ({verdict}{self.interval.low:.3g}..{self.interval.high:.3g}, n={self.pairs}, t)"


def paired_ratio(a: Sequence[float], b: Sequence[float]) -> Ratio:
    """Return a / b from pairs (a[i], b[i]), all above 0: exp of the mean log ratio, and of its t-interval."""
    return sum_of_logs([a, [1 / value for value in b]])


def sum_of_logs(terms: Sequence[Sequence[float]]) -> Ratio:
    """Return the product of factors as one Ratio; `terms[k][i]` is factor k in pair i, above 0.

    The logs are added pair by pair before the interval is taken, so that what moves all factors of a pair alike
    cancels. The interaction of switches is full / bare divided by each switch's own factor.
    """
    if not terms or not terms[0] or len({len(term) for term in terms}) != 1:
        raise ValueError(f"paired factors must be as many: {[len(term) for term in terms]}")
    sums = [math.fsum(math.log(value) for value in pair) for pair in zip(*terms, strict=True)]
    interval = t_interval(sums)
    if interval is not None:
        interval = Interval(math.exp(interval.low), math.exp(interval.high), interval.n, interval.method)
    return Ratio(math.exp(math.fsum(sums) / len(sums)), interval, len(sums))
