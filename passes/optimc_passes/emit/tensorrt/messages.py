"""What TensorRT says while it builds, collected instead of printed.

A process has one logger for all of TensorRT: the first one it is handed, whatever comes later. So ours is made once per
module and passes messages on to whoever listens. Error recorders, which belong to one builder, crash when they are
written in Python (TensorRT-RTX 1.7.1).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Any

_listening = threading.Lock()


@dataclass
class Messages:
    """Messages of one build, in the order they came."""

    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


@contextmanager
def listen(trt: ModuleType) -> Iterator[tuple[Any, Messages]]:
    """Yield the process's logger for `trt` and what it hears until the block ends. Builds of other threads wait.

    Where somebody else handed TensorRT a logger first, nothing is heard.
    """
    logger, messages = _logger(trt), Messages()
    with _listening:
        logger.messages = messages
        try:
            yield logger, messages
        finally:
            logger.messages = None


@cache
def _logger(trt: ModuleType) -> Any:
    class Logger(trt.ILogger):  # type: ignore[name-defined, misc]
        """Passes messages on."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.messages: Messages | None = None

        def log(self, severity: Any, text: str) -> None:
            """Keep errors and warnings; called by TensorRT, from threads of its own too."""
            messages = self.messages
            if messages is None:
                return
            if severity in (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR):
                messages.errors.append(text)
            elif severity == trt.ILogger.WARNING:
                messages.warnings.append(text)

    return Logger()
