"""What a ladder found, as data, as JSON and as a table with curves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from optimc.measure.bench_result import BenchResult
from optimc.measure.load.knee import Knee, Step
from optimc.measure.load.slo import Slo
from optimc.measure.machine import Machine
from optimc.measure.workload import Workload

BAR_CELLS = 16
"""Width of a bar that reaches the limit; one that goes beyond is cut at twice that."""


@dataclass(frozen=True, slots=True)
class LadderResult:
    """Rates ascending, each as it was measured last."""

    steps: tuple[Step, ...]
    knee: Knee
    slo: Slo
    attain: float
    """Share of requests that must keep the limits."""
    workload: Workload
    """Of the lowest rate; the others differ in that only."""
    machine: Machine
    closed: BenchResult | None = None
    """The closed loop that showed the capacity; None where rates were given."""
    warnings: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether any rate passes."""
        return self.knee.rate_per_s is not None

    @property
    def percentile(self) -> str:
        """The percentile of the curves: "p99" if every step has samples enough for it, else "p90"."""
        has_p99 = all(step.result.ttft_ms.p99 is not None for step in self.steps if step.result.ttft_ms.n)
        return "p99" if has_p99 else "p90"

    def to_json(self) -> dict[str, Any]:
        """Return everything, latencies in milliseconds, so that `from_json` gives it back."""
        return {
            "format": 1,
            "knee": self.knee.to_json(),
            "slo": self.slo.to_json(),
            "attain": self.attain,
            "percentile": self.percentile,
            "workload": self.workload.to_json(),
            "machine": self.machine.to_json(),
            "warnings": list(self.warnings),
            "closed": None if self.closed is None else self.closed.to_json(),
            "steps": [step.to_json() for step in self.steps],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LadderResult:
        """Read what `to_json` gave; the result equals the original."""
        steps = tuple(Step.from_json(step) for step in data["steps"])
        closed = data["closed"]
        return cls(
            steps=steps,
            knee=Knee.from_json(data["knee"]),
            slo=Slo.from_json(data["slo"]),
            attain=data["attain"],
            workload=Workload.from_json(data["workload"]),
            machine=steps[0].result.machine,
            closed=None if closed is None else BenchResult.from_json(closed),
            warnings=tuple(data["warnings"]),
        )

    def table(self) -> RenderableType:
        """Return the report for a terminal: the knee, why, then a line per rate with curves of both latencies."""
        head = Text(f"{self.steps[0].result.description}: {self.workload.shape()} and up\n")
        head.append(f"knee: {self.knee}", style="bold green" if self.ok else "bold red")
        head.append(f"\n{self.attain:.0%} of requests must keep {self.slo}\n")
        head.append(f"broke first: {self.knee.broke_first}: {self.knee.why}")
        return Group(head, self._curves(), *self._notes())

    def _curves(self) -> Table:
        q = self.percentile
        table = Table("rate/s", "goodput", f"TTFT {q} ms", "", f"TPOT {q} ms", "", "running", "failed", "")
        if self.closed is not None:
            closed = self.closed
            table.add_row(
                f"{closed.requests_per_s:.3g}", "", *self._latency(closed, "ttft"), *self._latency(closed, "tpot"),
                f"{closed.config.concurrency}", f"{closed.num_failures}", "closed loop: all it serves",
            )  # fmt: skip
        for step in self.steps:
            result = step.result
            running = "" if result.in_flight_thirds is None else f"{result.in_flight_thirds[2]:.1f}"
            table.add_row(
                f"{step.rate_per_s:.3g}",
                f"{step.attained:.1%}",
                *self._latency(result, "ttft"),
                *self._latency(result, "tpot"),
                running,
                f"{result.num_failures}",
                "passes" if step.passes else "; ".join(step.reasons),
                style=None if step.passes else "red",
            )
        return table

    def _latency(self, result: BenchResult, name: str) -> tuple[str, str]:
        """Return a figure and its bar: the limit, if there is one, is a stroke in it."""
        distribution = getattr(result, f"{name}_ms")
        value = getattr(distribution, self.percentile)
        if value is None:
            return f"n/a (n={distribution.n})", ""
        limit = self.slo.limit_ms(name)
        if limit is None:
            largest = max(getattr(getattr(s.result, f"{name}_ms"), self.percentile) or 0.0 for s in self.steps)
            return f"{value:,.1f}", "█" * round(BAR_CELLS * min(1.0, value / largest) if largest else 0)
        cells = min(2 * BAR_CELLS, round(BAR_CELLS * value / limit))
        below, above = min(cells, BAR_CELLS), max(0, cells - BAR_CELLS)
        return f"{value:,.1f}", "█" * below + "·" * (BAR_CELLS - below) + "│" + "█" * above

    def _notes(self) -> list[Text]:
        lines = [Text("│ in a bar: the limit. running: requests at once, on average in the last third.", style="dim")]
        if self.percentile == "p90":
            few = min(step.result.ttft_ms.n for step in self.steps)
            lines.append(Text(f"p90 is shown: the smallest step has {few} samples, too few for p99", style="dim"))
        lines += [Text(f"warning: {warning}", style="yellow") for warning in self.warnings]
        seen = dict.fromkeys(warning for step in self.steps for warning in step.result.warnings)
        late = [warning for warning in seen if "load generator" in warning]
        return lines + [Text(f"warning: {warning}", style="yellow") for warning in late[:1]]
