"""How messages quote long lists and other libraries' errors."""

from __future__ import annotations

from collections.abc import Sequence

MOST_LISTED = 5
"""Names a message lists before it only counts them."""


def listed(names: Sequence[str]) -> str:
    """Return the first names and how many more there are: "a, b, c, d, e and 7 more"."""
    more = f" and {len(names) - MOST_LISTED} more" if len(names) > MOST_LISTED else ""
    return ", ".join(names[:MOST_LISTED]) + more


def one_line(error: BaseException) -> str:
    """Return an error's message without its line breaks, or its type's name if it has no message."""
    return " ".join(str(error).split()) or type(error).__name__
