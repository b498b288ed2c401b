"""What a factor does to one figure, as a ratio with its interval, and to the divergence, as a difference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from optimc.measure.load.interval import Ratio, t_interval

EffectMethod = Literal["t", "bracket"]
"""Student's interval over pairs; or, for a knee, the quotients of the rates that held and those that failed."""


@dataclass(frozen=True, slots=True)
class Effect:
    """The figure with the factor over the figure without it."""

    value: float
    low: float | None
    """None where there are too few pairs for an interval."""
    high: float | None
    pairs: int
    method: EffectMethod = "t"

    @classmethod
    def of(cls, ratio: Ratio) -> Effect:
        """Take over a ratio of paired measurements."""
        interval = ratio.interval
        if interval is None:
            return cls(ratio.value, None, None, ratio.pairs)
        return cls(ratio.value, interval.low, interval.high, ratio.pairs)

    @classmethod
    def of_knees(cls, with_: tuple[float, float], without: tuple[float, float]) -> Effect:
        """Divide two knees, each (highest rate that held, lowest above it that failed) in requests/s."""
        return cls(with_[0] / without[0], with_[0] / without[1], with_[1] / without[0], 1, "bracket")

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Effect:
        """Inverse of `to_json`. Raises ValueError, KeyError or TypeError on anything else: a chart cannot place what is
        no ratio."""
        for name in ("value", "low", "high"):
            figure = data[name]
            if not (0 < figure < math.inf if figure is not None else name != "value"):
                raise ValueError(f"a ratio's {name} is a number above 0, got {figure}")
        return cls(data["value"], data["low"], data["high"], int(data["pairs"]), data.get("method", "t"))

    def to_json(self) -> dict[str, Any]:
        """Return all fields."""
        return {"value": self.value, "low": self.low, "high": self.high, "pairs": self.pairs, "method": self.method}

    @property
    def excludes_one(self) -> bool:
        """Whether there is a difference at all: the interval exists and does not hold 1."""
        return self.low is not None and self.high is not None and not self.low <= 1 <= self.high

    def cell(self) -> str:
        """Return two lines for a table: the value or that there is none to speak of, then the interval."""
        if self.low is None or self.high is None:
            return f"×{self.value:.3g}\nno interval"
        said = f"×{self.value:.3g}" if self.excludes_one else "no difference seen"
        return f"{said}\n{self.low:.3g}..{self.high:.3g}"

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"×{self.value:.3g} (n={self.pairs}: no interval)"
        bounds = f"{self.low:.3g}..{self.high:.3g}"
        return f"×{self.value:.3g} ({bounds})" if self.excludes_one else f"no difference seen ({bounds})"


@dataclass(frozen=True, slots=True)
class Difference:
    """A mean difference with its t-interval over `n` pairs of evaluation windows; nats per token."""

    value: float
    low: float | None
    high: float | None
    n: int

    @classmethod
    def of(cls, with_: Sequence[float], without: Sequence[float]) -> Difference | None:
        """Return with minus without, window by window; None unless both saw the same number of windows."""
        if not with_ or len(with_) != len(without):
            return None
        differences = [a - b for a, b in zip(with_, without, strict=True)]
        interval = t_interval(differences)
        low, high = (None, None) if interval is None else (interval.low, interval.high)
        return cls(sum(differences) / len(differences), low, high, len(differences))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Difference:
        """Inverse of `to_json`. Raises KeyError on anything else."""
        return cls(data["value"], data["low"], data["high"], data["n"])

    def to_json(self) -> dict[str, Any]:
        """Return all fields."""
        return {"value": self.value, "low": self.low, "high": self.high, "n": self.n}

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:+.2g} (n={self.n}: no interval)"
        if self.value == self.low == self.high == 0:
            return f"exactly the same (n={self.n})"
        bounds = f"{self.low:+.2g}..{self.high:+.2g}, n={self.n}"
        return f"no difference seen ({bounds})" if self.low <= 0 <= self.high else f"{self.value:+.2g} ({bounds})"
