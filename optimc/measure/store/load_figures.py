"""What is kept of one benchmark run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from optimc.measure.bench_result import BenchResult


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
        )

    def to_json(self) -> dict[str, Any]:
        """Return everything, so that `from_json` gives it back."""
        return {**asdict(self), "warnings": list(self.warnings)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LoadFigures:
        """Inverse of `to_json`. Raises KeyError or TypeError on anything else."""
        return cls(**{**data, "warnings": tuple(data["warnings"])})
