"""`optimc roofline`."""

from __future__ import annotations


def roofline() -> None:
    """Being written."""
    raise NotImplementedError
