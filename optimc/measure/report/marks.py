"""Marks of points and series. They differ in shape as well as in colour."""

from __future__ import annotations

import math

from optimc.measure.report.svg import SVG_NAMESPACE, Markup, element, number, path

SHAPES = ("circle", "square", "triangle", "diamond", "plus", "cross", "down", "star")
"""A series takes the next one, and begins anew when they are used up; its colour changes by another period."""

COLOURS = 7
"""Classes c0 .. c6 of the style sheet. Coprime to the shapes, so that 56 series differ."""


def shape_of(index: int) -> str:
    """Return the shape of the series `index`."""
    return SHAPES[index % len(SHAPES)]


def colour_of(index: int) -> str:
    """Return the class that gives the series `index` its colour."""
    return f"c{index % COLOURS}"


def mark(shape: str, x: float, y: float, radius: float, css_class: str) -> Markup:
    """Return a mark about (x, y). All shapes of one radius look about equally large."""
    if shape == "circle":
        return element("circle", {"cx": x, "cy": y, "r": radius, "class": css_class})
    lines = _LINES.get(shape)
    if lines is not None:
        data = " ".join(path((x + dx * radius, y + dy * radius) for dx, dy in line) for line in lines)
        return element("path", {"d": data, "class": f"{css_class} stroke"})
    corners = path((x + dx * radius, y + dy * radius) for dx, dy in _CORNERS[shape])
    return element("path", {"d": f"{corners} Z", "class": css_class})


def key(shape: str, css_class: str) -> Markup:
    """Return a mark on its own, as large as a letter, for legends in HTML text."""
    attrs = {"viewBox": "0 0 14 14", "class": "key", "aria-hidden": "true", "focusable": "false"}
    return element("svg", {"xmlns": SVG_NAMESPACE, **attrs}, mark(shape, 7.0, 7.0, 4.5, css_class))


def ring(x: float, y: float, radius: float) -> Markup:
    """Return a ring about a mark that is to be noticed."""
    return element("circle", {"cx": x, "cy": y, "r": radius, "class": "ring"})


def line(x1: float, y1: float, x2: float, y2: float, css_class: str) -> Markup:
    """Return a straight line."""
    return element("line", {"x1": x1, "y1": y1, "x2": x2, "y2": y2, "class": css_class})


def text(x: float, y: float, content: str, css_class: str = "", anchor: str = "start") -> Markup:
    """Return text that begins, is centred or ends at x."""
    attrs = {"x": x, "y": y, "class": css_class or None, "text-anchor": None if anchor == "start" else anchor}
    return element("text", attrs, content)


def turned_text(x: float, y: float, content: str, css_class: str) -> Markup:
    """Return centred text that is read from below."""
    turn = f"rotate(-90 {number(x)} {number(y)})"
    return element("text", {"x": x, "y": y, "class": css_class, "text-anchor": "middle", "transform": turn}, content)


def _star() -> tuple[tuple[float, float], ...]:
    radii = (1.25, 0.55)
    turns = ((i, -math.pi / 2 + i * math.pi / 5) for i in range(10))
    return tuple((radii[i % 2] * math.cos(a), radii[i % 2] * math.sin(a)) for i, a in turns)


_CORNERS: dict[str, tuple[tuple[float, float], ...]] = {
    "square": ((-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)),
    "triangle": ((0, -1.2), (1.1, 0.8), (-1.1, 0.8)),
    "down": ((0, 1.2), (1.1, -0.8), (-1.1, -0.8)),
    "diamond": ((0, -1.25), (1.25, 0), (0, 1.25), (-1.25, 0)),
    "star": _star(),
}
_LINES: dict[str, tuple[tuple[tuple[float, float], tuple[float, float]], ...]] = {
    "plus": (((-1.1, 0), (1.1, 0)), ((0, -1.1), (0, 1.1))),
    "cross": (((-0.9, -0.9), (0.9, 0.9)), ((-0.9, 0.9), (0.9, -0.9))),
}
