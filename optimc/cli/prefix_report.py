"""`optimc prefix-report`."""

from __future__ import annotations


def prefix_report() -> None:
    """Being written."""
    raise NotImplementedError
