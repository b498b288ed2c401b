"""Floors and predictions put to the test: short closed loops at several batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from optimc.measure.bench_result import BenchResult
from optimc.measure.roofline.row_bound import RowBound
from optimc.measure.workload import Workload

BATCHES = (1, 2, 4, 8, 16)
PROMPT_TOKENS, OUTPUT_TOKENS = 128, 64
MAX_ERROR = 0.25
"""Of a prediction, relative to what was measured."""


@dataclass(frozen=True, slots=True)
class CheckRow:
    """One batch."""

    batch: int
    measured_tpot_ms: float
    bound_tpot_ms: float
    predicted_tpot_ms: float | None
    limiter: str

    @property
    def error(self) -> float | None:
        """Of the prediction: 0.1 is predicted a tenth too slow."""
        if self.predicted_tpot_ms is None:
            return None
        return self.predicted_tpot_ms / self.measured_tpot_ms - 1

    @property
    def is_beaten(self) -> bool:
        """Whether the run was faster than its floor."""
        return self.measured_tpot_ms < self.bound_tpot_ms

    @property
    def ok(self) -> bool:
        """Whether the floor held and the prediction, if there is one, came close enough."""
        return not self.is_beaten and (self.error is None or abs(self.error) <= MAX_ERROR)

    def to_json(self) -> dict[str, Any]:
        """Return all fields, and the error and verdict."""
        return {**asdict(self), "error": self.error, "ok": self.ok}


def check(
    bench: Callable[[Workload], BenchResult],
    bound_of: Callable[[BenchResult], RowBound | None],
    batches: Sequence[int] = BATCHES,
) -> tuple[CheckRow, ...]:
    """Measure every batch and put floor and prediction beside it."""
    rows = []
    for batch in batches:
        workload = Workload(
            prompt_tokens=PROMPT_TOKENS,
            output_tokens=OUTPUT_TOKENS,
            concurrency=batch,
            requests=max(8, 2 * batch),
            warmup_requests=1 + batch,
        )
        result = bench(workload)
        bound, measured_ms = bound_of(result), result.tpot_ms.p50
        assert bound is not None, "the engine counts prompts"
        assert bound.tpot_ms is not None, "outputs of several tokens"
        assert measured_ms is not None, "outputs of several tokens"
        rows.append(CheckRow(batch, measured_ms, bound.tpot_ms, bound.predicted_tpot_ms, bound.limiter))
    return tuple(rows)


def check_table(rows: Sequence[CheckRow]) -> Table:
    """Return measured, bound, predicted and error, one row per batch."""
    table = Table(
        "batch", "measured", "bound", "% of bound", "limited by", "predicted", "error", "", title="TPOT p50, ms"
    )
    for row in rows:
        verdict = "bound exceeded: measure again with --fresh" if row.is_beaten else "" if row.ok else "off"
        table.add_row(
            f"{row.batch}",
            f"{row.measured_tpot_ms:,.2f}",
            f"{row.bound_tpot_ms:,.2f}",
            f"{row.bound_tpot_ms / row.measured_tpot_ms:.0%}",
            row.limiter,
            "" if row.predicted_tpot_ms is None else f"{row.predicted_tpot_ms:,.2f}",
            "" if row.error is None else f"{row.error:+.0%}",
            verdict,
        )
    return table
