"""What passes did, in short: printed when a build or an export has ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from optimc.cli.format import format_metrics
from optimc.cli.pass_listing import frontier_lines, quality_line
from optimc.plan import PassReport

if TYPE_CHECKING:
    from rich.console import Console


def print_passes(console: Console, title: str, reports: Sequence[PassReport]) -> None:
    """Print a table of the passes; below it what they did to predictions, and frontiers."""
    from rich.table import Table

    table = Table("pass", "seconds", "notes", title=title, title_justify="left")
    for report in reports:
        seconds = "cached" if report.cached else f"{report.seconds:.1f}"
        table.add_row(report.name, seconds, ", ".join(format_metrics(report.metrics)))
    console.print(table)
    for report in reports:
        if report.quality is not None:
            console.print(f"{report.name}: {quality_line(report.quality)}", soft_wrap=True)
        for line in frontier_lines(report.frontier):
            console.print(line, highlight=False, soft_wrap=True)
