"""Progress bars on standard error, so that standard output stays clean for tables and JSON."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from optimc.progress import Progress

if TYPE_CHECKING:
    from rich.console import Console


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Yield a callback (done, total, label) that draws one bar per label; finished ones stay with their time.

    Without a terminal (a pipe, a log) it writes a line when a label begins and one when it is done.
    """
    from rich import progress as bars
    from rich.console import Console

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if not console.is_terminal:
        yield _Lines(console).report
        return
    with bars.Progress(
        bars.SpinnerColumn(finished_text="✓"),
        bars.TextColumn("{task.description}"),
        bars.BarColumn(bar_width=30),
        bars.MofNCompleteColumn(),
        bars.TimeElapsedColumn(),
        console=console,
    ) as progress:
        tasks = {}

        def report(done: int, total: int, label: str) -> None:
            if label not in tasks:
                tasks[label] = progress.add_task(label, total=total)
            progress.update(tasks[label], completed=done, total=total)

        yield report


class _Lines:
    """Progress for logs: short work is one line, long work two."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._begun: dict[str, float] = {}
        self._ended: set[str] = set()

    def report(self, done: int, total: int, label: str) -> None:
        if label not in self._begun:
            self._begun[label] = time.monotonic()
            self._console.print(f"{label} ...", markup=False)
        if done >= total and label not in self._ended:
            self._ended.add(label)
            seconds = time.monotonic() - self._begun[label]
            if seconds >= 1:
                self._console.print(f"{label}: done in {seconds:.0f} s", markup=False)
