"""Ctrl-C while TensorRT works: the builder is told to give up, and the exception is raised when it has.

Python runs a signal's handler wherever it is, which is then one of our callbacks: TensorRT takes what a callback raises
for a fault of ours, prints it and builds on (seen of RTX 1.7.1).
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any


@contextmanager
def holding_interrupts() -> Iterator[Callable[[], bool]]:
    """Hold Ctrl-C back until the block ends, and then let it go; yield whether there was one.

    Elsewhere than in the main thread, and where somebody else takes care of Ctrl-C, nothing is held back.
    """
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: False
        return
    caught: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _frame: caught.append(number))
    try:
        yield lambda: bool(caught)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if caught:
            raise KeyboardInterrupt


@cache
def monitor_class(trt: ModuleType) -> Any:
    """Return the class for one TensorRT module. Its objects ask a function whether to give up."""

    class InterruptMonitor(trt.IProgressMonitor):  # type: ignore[name-defined, misc]
        """Stops a build between two of its steps."""

        def __init__(self, interrupted: Callable[[], bool]) -> None:
            trt.IProgressMonitor.__init__(self)
            self._interrupted = interrupted

        def phase_start(self, name: str, parent: str | None, num_steps: int) -> None:
            """Begin a phase; called by TensorRT, as the next two."""

        def step_complete(self, _name: str, _step: int) -> bool:
            """Return whether to go on."""
            return not self._interrupted()

        def phase_finish(self, name: str) -> None:
            """End a phase."""

    return InterruptMonitor
