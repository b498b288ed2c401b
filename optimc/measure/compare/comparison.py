"""What `optimc compare` found: one row per plan, the front marked, as data, Markdown and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import RenderableType

from optimc.measure.compare.columns import Column, columns_of
from optimc.measure.compare.config import CompareConfig
from optimc.measure.compare.cost import Price
from optimc.measure.compare.failure import Failure
from optimc.measure.compare.pareto import pareto_front
from optimc.measure.compare.row import KL_FLOOR, Row
from optimc.measure.machine import Machine

FRONT_MEANING = (
    "● on the Pareto front: no other row is at least as good in TTFT p50, TPOT p50 and KL together and better in one; "
    f"KL below {KL_FLOOR:g} counts as equal, rows with failed gates or requests do not compete"
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """All rows, at least one, in the order they were asked for. All have the same concurrencies."""

    rows: tuple[Row, ...]
    machine: Machine
    config: CompareConfig
    price: Price | None = None
    failures: tuple[Failure, ...] = ()
    """What has no row."""

    @property
    def ok(self) -> bool:
        """Whether no row has a problem, and nothing failed."""
        return not self.failures and not any(row.problems for row in self.rows)

    @property
    def columns(self) -> tuple[Column, ...]:
        """What is shown of each row: what was not asked for has no column."""
        return columns_of(self.rows, self.price)

    def to_json(self) -> dict[str, Any]:
        """Return all rows and what they were measured on."""
        return {
            "format": 1,
            "ok": self.ok,
            "rows": [row.to_json() for row in self.rows],
            "failures": [failure.to_json() for failure in self.failures],
            "machine": self.machine.to_json(),
            "setting": self.config.setting,
            "pareto": FRONT_MEANING,
            "price": None if self.price is None else {"per_hour": self.price.per_hour, "currency": self.price.currency},
        }

    def table(self) -> RenderableType:
        """Return the comparison for a terminal, 80 characters wide if need be."""
        from optimc.measure.compare.terminal import terminal_tables

        return terminal_tables(self.rows, self.columns, self.problems(), self.footnotes())

    def markdown(self) -> str:
        """Return the comparison as a Markdown table with its footnotes."""
        columns = self.columns
        lines = [
            _markdown_row(["plan", *(column.head for column in columns), "front"]),
            _markdown_row(["---", *["---:"] * len(columns), "---:"]),
            *(_markdown_row([row.name, *(column.cell(row) for column in columns), row.mark]) for row in self.rows),
        ]
        return "\n".join([*lines, "", *(f"- {line}" for line in [*self.problems(), *self.footnotes()])]) + "\n"

    def problems(self) -> list[str]:
        """Return what is wrong with which row, and what has none, one sentence each."""
        wrong = [f"{row.name}: {problem}" for row in self.rows for problem in row.problems]
        return [*map(str, self.failures), *wrong]

    def footnotes(self) -> list[str]:
        """Return what a reader must know, one sentence each."""
        lines = [
            self.config.setting,
            "TTFT, TPOT: medians at the lowest concurrency; tok/s @n: output tokens at concurrency n; ppl: perplexity",
            FRONT_MEANING,
            *(column.meaning for column in self.columns if column.meaning),
        ]
        lines += [f"{row.name}: {row.measurement.quality.note}" for row in self.rows if row.measurement.quality.note]
        for row in self.rows:
            lines += [f"{row.name}: {warning}" for warning in row.warnings]
        earlier = [f"{row.name} ({row.earlier})" for row in self.rows if row.measurement.earlier]
        if earlier:
            lines.append(f"measured earlier: {', '.join(earlier)}; --fresh measures again")
        return [*lines, f"machine: {self.machine}"]


def mark_front(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Return the rows with `on_front` set. Rows without costs are off the front and beat nobody."""
    costs = [row.costs for row in rows]
    marks = iter(pareto_front([cost for cost in costs if cost is not None]))
    fronts = [cost is not None and next(marks) for cost in costs]
    return tuple(replace(row, on_front=front) for row, front in zip(rows, fronts, strict=True))


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
