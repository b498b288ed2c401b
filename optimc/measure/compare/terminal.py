"""A comparison in 80 characters: figures are never folded, names may be."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from optimc.measure.compare.columns import Column
from optimc.measure.compare.row import Row


def terminal_tables(
    rows: Sequence[Row], columns: Sequence[Column], problems: Sequence[str], footnotes: Sequence[str]
) -> RenderableType:
    """Return problems first, then the table, that of load figures if there are any, and the footnotes."""
    tables = [_table(rows, [column for column in columns if column.group == group]) for group in ("main", "load")]
    return Group(
        *(Text(line, style="red") for line in problems),
        *(table for table in tables if len(table.columns) > 1),
        *(Text(line, style="dim") for line in footnotes),
    )


def _table(rows: Sequence[Row], columns: Sequence[Column]) -> Table:
    # No frame, one space between the columns, the mark before the name.
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("  plan", overflow="fold", min_width=14)
    for column in columns:
        heading = column.head.replace(" ", "\n").replace("perplexity", "ppl")
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        style = "red" if row.problems else "bold" if row.on_front else None
        # Text, not markup: a name may hold brackets.
        name = Text(f"{row.mark or ' '} {row.name}")
        table.add_row(name, *(column.cell(row) for column in columns), style=style)
    return table
