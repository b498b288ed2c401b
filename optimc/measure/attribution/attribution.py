"""The result of an attribution: what each factor gained, as data, as JSON and as a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_args

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from optimc.measure.attribution.effect import Difference, Effect
from optimc.measure.attribution.factors import FactorKind

N = TypeVar("N", int, float)

FORMAT = 1
METRICS = {"ttft_p50": "TTFT p50", "tpot_p50": "TPOT p50", "tokens_per_s": "tokens/s", "knee": "knee"}
"""Figures that effects are told of, and how they are headed."""

RowMode = Literal["without", "cumulative"]
"""`without`: the whole recipe over the recipe without the factor. `cumulative`: what stands above it in the order of
the recipe, with it over without it."""


@dataclass(frozen=True, slots=True)
class Row:
    """One factor under one workload."""

    factor: str
    kind: FactorKind
    mode: RowMode
    workload: str
    """Its shape; "" where nothing was measured."""
    metrics: Mapping[str, Effect | None] = field(default_factory=dict)
    """By name in METRICS; with / without, so below 1 is a gain for latencies, above 1 for rates."""
    plan_bytes: tuple[int, int] | None = None
    """With, without; None where the plan is the same."""
    kl: tuple[float, float] | None = None
    """With, without: KL(original || plan), nats per token; None where the plan is the same or nothing is known."""
    kl_difference: Difference | None = None
    na: str | None = None
    """Why nothing was measured."""
    note: str = ""
    plan: str = ""
    """Name of the plan without the factor."""

    def to_json(self) -> dict[str, Any]:
        """Return all fields."""
        return {
            "factor": self.factor,
            "kind": self.kind,
            "mode": self.mode,
            "workload": self.workload,
            "metrics": {name: None if e is None else e.to_json() for name, e in self.metrics.items()},
            "plan_bytes": None if self.plan_bytes is None else list(self.plan_bytes),
            "kl": None if self.kl is None else list(self.kl),
            "kl_difference": None if self.kl_difference is None else self.kl_difference.to_json(),
            "na": self.na,
            "note": self.note,
            "plan": self.plan,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Row:
        """Inverse of `to_json`. Raises ValueError, KeyError or TypeError on anything else."""
        difference = data["kl_difference"]
        if data["mode"] not in get_args(RowMode):
            raise ValueError(f"mode {data['mode']!r}, want one of {', '.join(get_args(RowMode))}")
        return cls(
            factor=data["factor"],
            kind=data["kind"],
            mode=data["mode"],
            workload=data["workload"],
            metrics={n: None if e is None else Effect.from_json(e) for n, e in data["metrics"].items()},
            plan_bytes=_two(data["plan_bytes"], int),
            kl=_two(data["kl"], float),
            kl_difference=None if difference is None else Difference.from_json(difference),
            na=data["na"],
            note=data["note"],
            plan=data["plan"],
        )


@dataclass(frozen=True, slots=True)
class Attribution:
    """What each pass and runtime feature of a recipe gained."""

    recipe: str
    base: Mapping[str, Any]
    """Figures of the whole recipe: plan_bytes, kl, and by workload `loads`: medians of its blocks."""
    rows: tuple[Row, ...]
    interaction: Mapping[str, Effect]
    """By "METRIC @ WORKLOAD": how much more all factors together did than the product of each one left out alone."""
    machine: Mapping[str, Any]
    method: tuple[str, ...]
    """How it was measured, and what the budget changed, in sentences."""

    def to_json(self) -> dict[str, Any]:
        """Return everything, so that `from_json` gives it back."""
        return {
            "format": FORMAT,
            "recipe": self.recipe,
            "base": dict(self.base),
            "rows": [row.to_json() for row in self.rows],
            "interaction": {name: effect.to_json() for name, effect in self.interaction.items()},
            "machine": dict(self.machine),
            "method": list(self.method),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Attribution:
        """Inverse of `to_json`. Raises ValueError for another format or figures that are none, KeyError or TypeError
        for what is no attribution."""
        if data["format"] != FORMAT:
            raise ValueError(f"attribution of format {data['format']}, want {FORMAT}")
        return cls(
            recipe=data["recipe"],
            base=data["base"],
            rows=tuple(Row.from_json(row) for row in data["rows"]),
            interaction={name: Effect.from_json(effect) for name, effect in data["interaction"].items()},
            machine=data["machine"],
            method=tuple(data["method"]),
        )

    def table(self) -> RenderableType:
        """Return the report for a terminal: the figures of the recipe, effects, interaction, what was not measured."""
        parts: list[RenderableType] = [self._headline()]
        for mode, title in (
            ("without", "Left out: the recipe / the recipe without the factor"),
            ("cumulative", "Added: with the factor / without it, on top of the rows above"),
        ):
            rows = [row for row in self.rows if row.mode == mode and row.na is None]
            if not rows:
                continue
            parts.append(Text(f"\n{title}", style="bold"))
            parts += [_effects(load, rows) for load in dict.fromkeys(row.workload for row in rows)]
            parts += _plans(rows)
        parts += [self._interaction(), *self._unmeasured(), Text("\n".join(self.method), style="dim")]
        return Group(*parts)

    def _headline(self) -> Text:
        text = Text(f"{self.recipe}: {self.base['plan_bytes'] / 1e6:,.1f} MB", style="bold")
        if self.base.get("kl") is not None:
            text.append(f", KL {self.base['kl']:.3g} nats per token")
        for shape, load in self.base["loads"].items():
            text.append(
                f"\n  {shape}: TTFT p50 {_number(load['ttft_p50_ms'])} ms, TPOT p50 {_number(load['tpot_p50_ms'])} ms, "
                f"{_number(load['tokens_per_s'])} tokens/s",
                style="not bold",
            )
        return text

    def _interaction(self) -> RenderableType:
        if not self.interaction:
            return Text()
        table = Table(
            "interaction of all factors",
            "",
            "n",
            title="More (above 1) than the factors' product",
            title_justify="left",
        )
        for name, effect in self.interaction.items():
            table.add_row(name, str(effect).replace("no difference seen", "none seen"), str(effect.pairs))
        return table

    def _unmeasured(self) -> list[Text]:
        found = dict.fromkeys((row.factor, row.mode, row.workload, row.na) for row in self.rows if row.na is not None)
        return [
            Text(f"{factor} ({mode}{', ' + load if load else ''}): not measured: {reason}", style="yellow")
            for factor, mode, load, reason in found
        ]


def _two(values: Sequence[Any] | None, kind: Callable[[Any], N]) -> tuple[N, N] | None:
    """Return with and without. Raises ValueError or TypeError for what are not two numbers."""
    if values is None:
        return None
    with_, without = values
    return kind(with_), kind(without)


def _effects(load: str, rows: Sequence[Row]) -> Table:
    """One load's effects. Every cell has its interval; pairs and their number stand in the heading."""
    shown = [row for row in rows if row.workload == load]
    names = [name for name in METRICS if any(row.metrics.get(name) is not None for row in shown)]
    effects = [effect for row in shown for effect in row.metrics.values() if effect is not None]
    pairs = sorted({effect.pairs for effect in effects if effect.method == "t"})
    notes = "; ".join(dict.fromkeys(f"{row.factor}: {row.note}" for row in shown if row.note))
    table = Table("factor", *(METRICS[name] for name in names), title_justify="left", caption_justify="left")
    table.title = load + (f"; n = {' or '.join(map(str, pairs))} pairs" if pairs else "")
    table.caption = notes or None
    table.columns[0].no_wrap = True
    for row in shown:
        cells = [row.metrics.get(name) for name in names]
        table.add_row(row.factor, *("n/a" if effect is None else effect.cell() for effect in cells))
    return table


def _plans(rows: Sequence[Row]) -> list[Table]:
    """What the factors did to the plan: that does not depend on the load."""
    changed = {row.factor: row for row in reversed(rows) if row.plan_bytes is not None}
    if not changed:
        return []
    table = Table("factor", "plan size", "KL, nats per token", "plan without it", title="plans", title_justify="left")
    table.columns[0].no_wrap = True
    for name in dict.fromkeys(row.factor for row in rows):
        row = changed.get(name)
        if row is not None and row.plan_bytes is not None:
            table.add_row(name, f"×{row.plan_bytes[0] / row.plan_bytes[1]:.3g}", _kl(row), row.plan)
    return [table]


def _kl(row: Row) -> str:
    if row.kl_difference is not None:
        return str(row.kl_difference)
    return "not measured" if row.kl is None else f"{row.kl[0] - row.kl[1]:+.2g}"


def _number(value: float | None) -> str:
    return "n/a" if value is None else f"{value:,.1f}"
