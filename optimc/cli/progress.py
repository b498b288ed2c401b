"""Progress bars on standard error, so that standard output stays clean for tables and JSON."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich import progress as bars
from rich.console import Console

from optimc.progress import Progress


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Yield a callback (done, total, label) that draws one bar per label; finished ones stay with their time."""
    console = Console(stderr=True)
    with bars.Progress(
        bars.SpinnerColumn(finished_text="✓"),
        bars.TextColumn("{task.description}"),
        bars.BarColumn(bar_width=30),
        bars.MofNCompleteColumn(),
        bars.TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as progress:
        tasks = {}

        def report(done: int, total: int, label: str) -> None:
            if label not in tasks:
                tasks[label] = progress.add_task(label, total=total)
            progress.update(tasks[label], completed=done, total=total)

        yield report
