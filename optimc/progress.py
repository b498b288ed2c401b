"""How long work tells how far it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int, str], None]
"""Called as work proceeds: pieces done, pieces in total, what is being done."""


def no_progress(_done: int, _total: int, _label: str) -> None:
    """Tell nobody."""
