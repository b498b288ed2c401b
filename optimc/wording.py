"""How messages quote long lists and other libraries' errors."""

from __future__ import annotations

import sys
import traceback
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


def raised(error: BaseException, file: str | None) -> str:
    """Return an error's type and message, and the last line of `file` it came through if it did: code of a user's."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    place = f" ({file}, line {lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {one_line(error)}{place}"


def source_file(of: type) -> str | None:
    """Return the file a class was written in, as tracebacks call it; None if that is not known."""
    return getattr(sys.modules.get(of.__module__), "__file__", None)
