"""One plan in a comparison."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimc.measure.compare.measurement import Measurement

KL_FLOOR = 1e-6
"""Below this, in nats per token, KL is float32 rounding, and a smaller one is no better."""


@dataclass(frozen=True, slots=True)
class Row:
    """One plan, what was measured of it, and how it stands among the others."""

    name: str
    path: Path
    size_bytes: int
    measurement: Measurement
    problems: tuple[str, ...]
    """Gates that do not hold and benchmark runs with too many failures, one sentence each."""
    cost: float | None = None
    """Of a million output tokens, in the comparison's currency; None where no price was given, or no rate is known."""
    on_front: bool = False

    @property
    def cached(self) -> bool:
        """Whether all figures were taken in an earlier run."""
        return self.measurement.cached

    @property
    def mark(self) -> str:
        """How the row stands: on the front, failed, or neither."""
        return "✗" if self.problems else "●" if self.on_front else ""

    @property
    def costs(self) -> tuple[float, float, float] | None:
        """TTFT p50 and TPOT p50 at the lowest concurrency, KL: what the front is taken over. None if it is not
        eligible."""
        load, kl = self.measurement.loads[0], self.measurement.quality.kl_mean
        if self.problems or load.ttft_p50_ms is None or load.tpot_p50_ms is None or kl is None or math.isnan(kl):
            return None
        return load.ttft_p50_ms, load.tpot_p50_ms, max(kl, KL_FLOOR)

    @property
    def earlier(self) -> str:
        """Which figures were taken in earlier runs, and when; the time alone if all were at once."""
        origins = self.measurement.earlier
        times = sorted({origin.measured_at for origin in origins})
        days = sorted({time[:10] for time in times})
        when = times[0] if len(times) == 1 else " to ".join(dict.fromkeys((days[0], days[-1])))
        return when if self.cached else f"{', '.join(origin.what for origin in origins)}: {when}"

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the benchmark runs and the ladder said about their own figures, each once."""
        found = [
            f"at concurrency {load.concurrency}: {text}" for load in self.measurement.loads for text in load.warnings
        ]
        bounds = [load.bound.note for load in self.measurement.loads if load.bound is not None and load.bound.note]
        return tuple(dict.fromkeys([*found, *bounds]))

    def to_json(self) -> dict[str, Any]:
        """Return the row's figures by name."""
        measured = self.measurement.to_json()
        load = self.measurement.loads[0]
        return {
            "name": self.name,
            "plan": str(self.path),
            "plan_bytes": self.size_bytes,
            "ttft_p50_ms": load.ttft_p50_ms,
            "tpot_p50_ms": load.tpot_p50_ms,
            "output_tokens_per_s": {str(each.concurrency): each.output_tokens_per_s for each in self.measurement.loads},
            **self.measurement.quality.to_json(),
            "pareto": self.on_front,
            "cost_per_million": self.cost,
            "problems": list(self.problems),
            "cached": self.cached,
            "measured_at": max(origin.measured_at for origin in self.measurement.origins),
            "origins": measured["origins"],
            "loads": measured["loads"],
            "ladder": measured["ladder"],
        }
