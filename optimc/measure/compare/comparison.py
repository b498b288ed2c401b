"""What `optimc compare` found: one row per plan, the front marked, as data, table, Markdown and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from optimc.measure.compare.measurement import Measurement
from optimc.measure.compare.pareto import pareto_front
from optimc.measure.machine import Machine

KL_FLOOR = 1e-6
"""Below this, in nats per token, KL is float32 rounding, and a smaller one is no better."""

FRONT_MEANING = (
    "● on the Pareto front: no other row is at least as good in TTFT p50, TPOT p50 and KL together and better in one; "
    f"KL below {KL_FLOOR:g} counts as equal, rows with failed gates or requests do not compete"
)


@dataclass(frozen=True, slots=True)
class Row:
    """One plan."""

    name: str
    path: Path
    size_bytes: int
    measurement: Measurement
    cached: bool
    """Whether the figures were taken in an earlier run."""
    problems: tuple[str, ...]
    """Gates that do not hold and benchmark runs with too many failures, one sentence each."""
    on_front: bool = False

    @property
    def costs(self) -> tuple[float, float, float] | None:
        """TTFT p50 and TPOT p50 at the lowest concurrency, KL: what the front is taken over. None if it is not
        eligible."""
        load, kl = self.measurement.loads[0], self.measurement.quality.kl_mean
        if self.problems or load.ttft_p50_ms is None or load.tpot_p50_ms is None or kl is None:
            return None
        return load.ttft_p50_ms, load.tpot_p50_ms, max(kl, KL_FLOOR)

    def to_json(self) -> dict[str, Any]:
        """Return the row's figures by name."""
        load, quality = self.measurement.loads[0], self.measurement.quality
        return {
            "name": self.name,
            "plan": str(self.path),
            "plan_bytes": self.size_bytes,
            "ttft_p50_ms": load.ttft_p50_ms,
            "tpot_p50_ms": load.tpot_p50_ms,
            "output_tokens_per_s": {str(each.concurrency): each.output_tokens_per_s for each in self.measurement.loads},
            **quality.to_json(),
            "pareto": self.on_front,
            "problems": list(self.problems),
            "cached": self.cached,
            "measured_at": self.measurement.measured_at,
            "loads": self.measurement.to_json()["loads"],
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """All rows in the order they were asked for. All have the same concurrencies."""

    rows: tuple[Row, ...]
    machine: Machine
    setting: str
    """Lengths of prompts, outputs and evaluation, for the reader."""

    @property
    def ok(self) -> bool:
        """Whether no row has a problem."""
        return not any(row.problems for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """Return all rows and what they were measured on."""
        return {
            "ok": self.ok,
            "rows": [row.to_json() for row in self.rows],
            "machine": self.machine.to_json(),
            "setting": self.setting,
            "pareto": FRONT_MEANING,
        }

    def table(self) -> RenderableType:
        """Return the comparison for a terminal, 80 characters wide if need be."""
        # No frame, one space between the columns, the mark before the name: only names may be folded, never figures.
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        first, *others, _mark = self._headings()
        table.add_column(f"  {first}", overflow="fold", min_width=14)
        for heading in others:
            table.add_column(heading.replace(" ", "\n").replace("perplexity", "ppl"), justify="right", no_wrap=True)
        for row in self.rows:
            name, *figures, mark = _cells(row)
            style = "red" if row.problems else "bold" if row.on_front else None
            table.add_row(f"{mark or ' '} {name}", *figures, style=style)
        problems = [Text(line, style="red") for line in self._problems()]
        return Group(*problems, table, *(Text(line, style="dim") for line in self._footnotes()))

    def markdown(self) -> str:
        """Return the comparison as a Markdown table with its footnotes."""
        headings = self._headings()
        lines = [_markdown_row(headings), _markdown_row(["---", *["---:"] * (len(headings) - 1)])]
        lines += [_markdown_row(_cells(row)) for row in self.rows]
        return "\n".join([*lines, "", *(f"- {line}" for line in [*self._problems(), *self._footnotes()])]) + "\n"

    def _headings(self) -> list[str]:
        loads = self.rows[0].measurement.loads if self.rows else ()
        rates = [f"tok/s @{load.concurrency}" for load in loads]
        return ["plan", "MB", "TTFT ms", "TPOT ms", *rates, "perplexity", "KL", "top-1", "front"]

    def _problems(self) -> list[str]:
        return [f"{row.name}: {problem}" for row in self.rows for problem in row.problems]

    def _footnotes(self) -> list[str]:
        lines = [
            self.setting,
            "TTFT, TPOT: medians at the lowest concurrency; tok/s @n: output tokens at concurrency n; ppl: perplexity",
            FRONT_MEANING,
        ]
        lines += [f"{row.name}: {row.measurement.quality.note}" for row in self.rows if row.measurement.quality.note]
        earlier = [f"{row.name} ({row.measurement.measured_at})" for row in self.rows if row.cached]
        if earlier:
            lines.append(f"measured earlier: {', '.join(earlier)}; --fresh measures again")
        return [*lines, f"machine: {self.machine}"]


def mark_front(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Return the rows with `on_front` set. Rows without costs are off the front and beat nobody."""
    costs = [row.costs for row in rows]
    marks = iter(pareto_front([cost for cost in costs if cost is not None]))
    fronts = [cost is not None and next(marks) for cost in costs]
    return tuple(replace(row, on_front=front) for row, front in zip(rows, fronts, strict=True))


def _cells(row: Row) -> list[str]:
    load, quality = row.measurement.loads[0], row.measurement.quality
    return [
        row.name,
        f"{row.size_bytes / 1e6:,.1f}",
        _shown(load.ttft_p50_ms, ",.1f"),
        _shown(load.tpot_p50_ms, ",.2f"),
        *(_shown(each.output_tokens_per_s, ",.1f") for each in row.measurement.loads),
        f"{quality.perplexity:.3f}",
        _shown(quality.kl_mean, ".3g"),
        _shown(quality.top1_agreement, ".2%"),
        "✗" if row.problems else "●" if row.on_front else "",
    ]


def _shown(value: float | None, spec: str) -> str:
    return "n/a" if value is None else format(value, spec)


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
