"""What a comparison shows of each row, in one order for terminal, Markdown and HTML."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from optimc.measure.compare.cost import Price
from optimc.measure.compare.row import Row


@dataclass(frozen=True, slots=True)
class Column:
    """One figure of every row."""

    head: str
    cell: Callable[[Row], str]
    group: Literal["main", "load"] = "main"
    """A terminal of 80 characters shows those of "load" in a table of their own."""
    meaning: str = ""
    """For a reader who has not met it; "" if the footnotes say it."""


def columns_of(rows: Sequence[Row], price: Price | None) -> tuple[Column, ...]:
    """Return the columns: figures that no row was asked for have none."""
    counts = [load.concurrency for load in rows[0].measurement.loads] if rows else []
    columns = [
        Column("MB", lambda row: f"{row.size_bytes / 1e6:,.1f}"),
        Column("TTFT ms", lambda row: shown(row.measurement.loads[0].ttft_p50_ms, ",.1f")),
        Column("TPOT ms", lambda row: shown(row.measurement.loads[0].tpot_p50_ms, ",.2f")),
        *(_rate(index, count) for index, count in enumerate(counts)),
    ]
    if any(load.bound is not None for row in rows for load in row.measurement.loads):
        columns += [_bound(index, count, first=index == 0) for index, count in enumerate(counts)]
    if any(row.measurement.ladder is not None for row in rows):
        columns += _ladder_columns()
    if price is not None:
        has_ladder = any(row.measurement.ladder is not None for row in rows)
        where = "at the knee, tokens within the limits" if has_ladder else "at the best concurrency"
        meaning = f"cost: {price.currency} per million output tokens {where}, at {price.per_hour:g} an hour"
        columns.append(Column(f"{price.currency}/M tok", lambda row: shown(row.cost, ",.3g"), "load", meaning))
    return (
        *columns,
        Column("perplexity", lambda row: _perplexity(row.measurement.quality.perplexity)),
        Column("KL", lambda row: shown(row.measurement.quality.kl_mean, ".3g")),
        Column("top-1", lambda row: shown(row.measurement.quality.top1_agreement, ".2%")),
    )


def _rate(index: int, concurrency: int) -> Column:
    return Column(f"tok/s @{concurrency}", lambda row: shown(row.measurement.loads[index].output_tokens_per_s, ",.1f"))


def _bound(index: int, concurrency: int, *, first: bool) -> Column:
    def cell(row: Row) -> str:
        bound = row.measurement.loads[index].bound
        return "n/a" if bound is None else shown(bound.tpot_share, ".0%")

    meaning = "bound @n: the least TPOT this machine allows over the measured median; 100% is as fast as it goes"
    return Column(f"bound @{concurrency}", cell, "load", meaning if first else "")


def _ladder_columns() -> list[Column]:
    def knee(row: Row) -> str:
        ladder = row.measurement.ladder
        if ladder is None or ladder.knee.rate_per_s is None:
            return "n/a" if ladder is None else "none"
        at_least = "≥ " if ladder.knee.fails_at_per_s is None else ""
        return f"{at_least}{ladder.knee.rate_per_s:.3g}"

    def broke(row: Row) -> str:
        ladder = row.measurement.ladder
        return "n/a" if ladder is None else ladder.knee.broke_first

    meaning = "knee: the highest arrival rate, in requests/s, at which the limits held; broke: which broke first above"
    return [Column("knee /s", knee, "load", meaning), Column("broke", broke, "load")]


def _perplexity(value: float) -> str:
    """Return it to three decimals; that of a broken plan, which may be anything, in few characters."""
    return f"{value:.3f}" if value < 1e5 else f"{value:.3g}"


def shown(value: float | None, spec: str) -> str:
    """Return a figure, or n/a."""
    return "n/a" if value is None else format(value, spec)
