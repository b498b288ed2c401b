"""Markup out of Python values. Everything that is not already Markup is escaped, so names may hold anything."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

SVG_NAMESPACE = "http://www.w3.org/2000/svg"

_VOID = frozenset({"meta", "br", "hr"})
"""HTML elements without an end."""

# Characters that XML 1.0 cannot hold, not even escaped.
_IMPOSSIBLE = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_ESCAPES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;"}


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


def escape(text: str) -> Markup:
    """Return text as it may stand in elements and in attributes; what XML cannot hold becomes U+FFFD."""
    possible = _IMPOSSIBLE.sub("\ufffd", text)
    return Markup("".join(_ESCAPES.get(character, character) for character in possible))


def element(tag: str, attrs: Mapping[str, object] | None = None, *children: str) -> Markup:
    """Return an element. Attributes that are None are left out, floats written to a hundredth of a unit."""
    written = "".join(f' {name}="{_value(value)}"' for name, value in (attrs or {}).items() if value is not None)
    if tag in _VOID:
        return Markup(f"<{tag}{written}>")
    return Markup(f"<{tag}{written}>{join(children)}</{tag}>")


def join(parts: Iterable[str], between: str = "") -> Markup:
    """Return the parts one after the other, those that are not Markup escaped."""
    return Markup(escape(between).join(part if isinstance(part, Markup) else escape(part) for part in parts))


def number(value: float) -> str:
    """Return a coordinate to a hundredth of a unit, without zeros that say nothing."""
    if not math.isfinite(value):
        raise ValueError(f"a coordinate must be finite, got {value}")
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text in ("", "-0") else text


def path(points: Iterable[tuple[float, float]]) -> str:
    """Return the data of a path through the points, in order."""
    return " ".join(f"{'L' if i else 'M'}{number(x)} {number(y)}" for i, (x, y) in enumerate(points))


def _value(value: object) -> str:
    return number(value) if isinstance(value, float) else escape(str(value))
