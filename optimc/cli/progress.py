"""Progress bars on standard error, so that standard output stays clean for tables and JSON."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from optimc.build import ProgressCallback


@contextmanager
def progress_bar() -> Iterator[ProgressCallback]:
    """Yield a callback (done, total, label) that draws one bar per label; finished ones stay with their time."""
    console = Console(stderr=True)
    with Progress(
        SpinnerColumn(finished_text="✓"),
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as progress:
        tasks = {}

        def report(done: int, total: int, label: str) -> None:
            if label not in tasks:
                tasks[label] = progress.add_task(label, total=total)
            progress.update(tasks[label], completed=done, total=total)

        yield report
