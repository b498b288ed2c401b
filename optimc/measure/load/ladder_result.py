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
        return Group(head, self._rows(), *self._reasons(), *self._curve("ttft"), *self._curve("tpot"), *self._notes())

    def _rows(self) -> Table:
        q = self.percentile
        table = Table("rate/s", "goodput", f"TTFT {q}", f"TPOT {q}", "running", "failed", "")
        if self.closed is not None:
            closed = self.closed
            table.add_row(
                f"{closed.requests_per_s:.3g}", "", self._cell(closed, "ttft"), self._cell(closed, "tpot"),
                f"{closed.config.concurrency}", f"{closed.num_failures}", "closed",
            )  # fmt: skip
        for step in self.steps:
            result = step.result
            table.add_row(
                f"{step.rate_per_s:.3g}",
                f"{step.attained:.1%}",
                self._cell(result, "ttft"),
                self._cell(result, "tpot"),
                "" if result.in_flight_thirds is None else f"{result.in_flight_thirds[2]:.1f}",
                f"{result.num_failures}",
                "passes" if step.passes else "fails",
                style=None if step.passes else "red",
            )
        return table

    def _reasons(self) -> list[Text]:
        return [
            Text(f"{step.rate_per_s:.3g}/s fails: {'; '.join(step.reasons)}") for step in self.steps if step.reasons
        ]

    def _value(self, result: BenchResult, name: str) -> float | None:
        value: float | None = getattr(getattr(result, f"{name}_ms"), self.percentile)
        return value

    def _cell(self, result: BenchResult, name: str) -> str:
        value = self._value(result, name)
        return f"n/a (n={getattr(result, f'{name}_ms').n})" if value is None else f"{value:,.1f}"

    def _curve(self, name: str) -> list[Text]:
        """Return a bar per rate; the limit, if there is one, is a stroke in it."""
        values = [(step.rate_per_s, self._value(step.result, name)) for step in self.steps]
        known = [(rate, value) for rate, value in values if value is not None]
        if not known:
            return []
        limit = self.slo.limit_ms(name)
        scale = max(value for _, value in known) if limit is None else limit
        lines = [
            Text(f"{name.upper()} {self.percentile} against rate" + ("" if limit is None else f", limit {limit:g} ms"))
        ]
        for rate, value in known:
            # Beyond twice the limit all is equally lost; the figure stands beside it.
            cells = min(2 * BAR_CELLS, round(BAR_CELLS * value / scale)) if scale > 0 else 0
            bar = "█" * min(cells, BAR_CELLS)
            if limit is not None:
                bar = bar.ljust(BAR_CELLS, "·") + "│" + "█" * max(0, cells - BAR_CELLS)
            lines.append(Text(f"{rate:>8.3g}/s {bar} {value:,.1f}", style="red" if limit and value > limit else ""))
        return lines

    def _notes(self) -> list[Text]:
        lines = [Text("ms. running: requests at once, on average in the last third of the window", style="dim")]
        if self.percentile == "p90":
            few = min(step.result.ttft_ms.n for step in self.steps)
            lines.append(Text(f"p90 is shown: the smallest step has {few} samples, too few for p99", style="dim"))
        lines += [Text(f"warning: {warning}", style="yellow") for warning in self.warnings]
        seen = dict.fromkeys(warning for step in self.steps for warning in step.result.warnings)
        late = [warning for warning in seen if "load generator" in warning]
        return lines + [Text(f"warning: {warning}", style="yellow") for warning in late[:1]]
