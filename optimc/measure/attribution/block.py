"""One block: one side of a comparison under one load, for as long as its requests take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from optimc.measure.bench_result import BenchResult


@dataclass(frozen=True, slots=True)
class Block:
    """Figures of good requests."""

    ttft_p50_ms: float | None
    tpot_p50_ms: float | None
    tokens_per_s: float | None
    """Steady state; None where the block was too short for one."""
    whole_run_tokens_per_s: float | None
    requests: int
    failures: int
    failure: str | None
    """The most frequent reason."""
    seconds: float
    """Warm-up included: what another such block will take."""

    @classmethod
    def of(cls, result: BenchResult, seconds: float) -> Block:
        """Pick the figures of a benchmark run that took `seconds`."""
        return cls(
            ttft_p50_ms=result.ttft_ms.p50,
            tpot_p50_ms=result.tpot_ms.p50,
            tokens_per_s=result.output_tokens_per_s,
            whole_run_tokens_per_s=result.output_tokens_per_s_whole_run,
            requests=result.requests,
            failures=result.num_failures,
            failure=next(iter(result.failures), None),
            seconds=seconds,
        )

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Block:
        """Inverse of `to_json`. Raises TypeError on anything else."""
        return cls(**data)

    def to_json(self) -> dict[str, Any]:
        """Return all fields."""
        return asdict(self)
