"""`optimc attribute`."""

from __future__ import annotations


def attribute() -> None:
    """Being written."""
    raise NotImplementedError
