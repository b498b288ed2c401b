"""`optimc search`."""

from __future__ import annotations


def search() -> None:
    """Being written."""
    raise NotImplementedError
