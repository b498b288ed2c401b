"""One plan's figures on one machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from optimc.measure.evaluation import EvalResult
from optimc.measure.store import LoadFigures


@dataclass(frozen=True, slots=True)
class Measurement:
    """Latency at each concurrency, ascending, and quality."""

    loads: tuple[LoadFigures, ...]
    quality: EvalResult
    measured_at: str
    """UTC, ISO 8601."""

    def to_json(self) -> dict[str, Any]:
        """Return everything, so that `from_json` gives it back."""
        return {**asdict(self), "loads": [load.to_json() for load in self.loads]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Measurement:
        """Inverse of `to_json`. Raises KeyError or TypeError on anything else."""
        quality = {**data["quality"], "kl_windows": tuple(data["quality"]["kl_windows"])}
        return cls(tuple(map(LoadFigures.from_json, data["loads"])), EvalResult(**quality), data["measured_at"])
