"""One plan's figures on one machine, each with when it was taken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from optimc.measure.evaluation import EvalResult
from optimc.measure.store import LoadFigures

if TYPE_CHECKING:
    from optimc.measure.load.ladder_result import LadderResult


@dataclass(frozen=True, slots=True)
class Origin:
    """Where one figure comes from."""

    what: str
    """ "bench @8", "quality" or "ladder"."""
    measured_at: str
    """UTC, ISO 8601."""
    cached: bool
    """Taken in an earlier run."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Latency at each concurrency, ascending, quality, and the ladder if one was asked for."""

    loads: tuple[LoadFigures, ...]
    quality: EvalResult
    ladder: LadderResult | None
    origins: tuple[Origin, ...]
    """Of the loads, the quality and the ladder, in this order."""

    @property
    def cached(self) -> bool:
        """Whether every figure was taken in an earlier run."""
        return all(origin.cached for origin in self.origins)

    @property
    def earlier(self) -> tuple[Origin, ...]:
        """The figures taken in earlier runs."""
        return tuple(origin for origin in self.origins if origin.cached)

    def to_json(self) -> dict[str, Any]:
        """Return all figures."""
        return {
            "loads": [load.to_json() for load in self.loads],
            "quality": self.quality.to_json(),
            "ladder": None if self.ladder is None else self.ladder.to_json(),
            "origins": [{"what": o.what, "measured_at": o.measured_at, "cached": o.cached} for o in self.origins],
        }
