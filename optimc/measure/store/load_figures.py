"""What is kept of one benchmark run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from optimc.measure.bench_result import BenchResult
from optimc.measure.load.goodput import Goodput
from optimc.measure.load.interval import Interval
from optimc.measure.roofline.row_bound import RowBound


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """The figures of a run that are compared, shown and searched by. Latencies in milliseconds, of good requests."""

    concurrency: int
    """Clients of a closed loop."""
    requests: int
    failures: int
    ttft_p50_ms: float | None
    ttft_p90_ms: float | None
    ttft_p99_ms: float | None
    """None below the samples a p99 needs."""
    tpot_p50_ms: float | None
    tpot_p90_ms: float | None
    tpot_p99_ms: float | None
    output_tokens_per_s: float | None
    requests_per_s: float
    warnings: tuple[str, ...]
    goodput: Goodput | None = None
    """None without limits."""
    intervals: Mapping[str, Interval] = field(default_factory=dict)
    """By figure: "ttft_ms.p50" and the like."""
    bound: RowBound | None = None
    """How far the machine would let it go; None where that was not looked at."""
    runs: int = 1
    """Above 1: values are medians over runs."""

    @classmethod
    def of(cls, result: BenchResult) -> LoadFigures:
        """Pick the figures."""
        return cls(
            concurrency=result.config.concurrency,
            requests=result.requests,
            failures=result.num_failures,
            ttft_p50_ms=result.ttft_ms.p50,
            ttft_p90_ms=result.ttft_ms.p90,
            ttft_p99_ms=result.ttft_ms.p99,
            tpot_p50_ms=result.tpot_ms.p50,
            tpot_p90_ms=result.tpot_ms.p90,
            tpot_p99_ms=result.tpot_ms.p99,
            output_tokens_per_s=result.output_tokens_per_s,
            requests_per_s=result.requests_per_s,
            warnings=result.warnings,
            goodput=result.goodput,
            intervals=dict(result.intervals),
            bound=result.bound,
            runs=result.runs,
        )

    def to_json(self) -> dict[str, Any]:
        """Return everything, so that `from_json` gives it back."""
        plain = replace(self, goodput=None, intervals={}, bound=None)
        return {
            **asdict(plain),
            "warnings": list(self.warnings),
            "goodput": None if self.goodput is None else self.goodput.to_json(),
            "intervals": {name: interval.to_json() for name, interval in self.intervals.items()},
            "bound": None if self.bound is None else self.bound.to_json(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LoadFigures:
        """Inverse of `to_json`. Raises KeyError or TypeError on anything else."""
        taken = {
            "warnings": tuple(data["warnings"]),
            "goodput": None if data["goodput"] is None else Goodput.from_json(data["goodput"]),
            "intervals": {name: Interval.from_json(found) for name, found in data["intervals"].items()},
            "bound": None if data["bound"] is None else RowBound.from_json(data["bound"]),
        }
        return cls(**{**data, **taken})
