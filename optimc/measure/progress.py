"""How long work tells how far it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int, str], None]
"""Called as (done, total, label); one bar per label."""


def no_progress(done: int, total: int, label: str) -> None:
    """Tell nobody."""
