"""What all charts have: axes, a frame of one size, title and description, and their figures as a table."""

from __future__ import annotations

from collections.abc import Sequence

from optimc.measure.report.labels import Box
from optimc.measure.report.marks import line, text, turned_text
from optimc.measure.report.scale import Scale
from optimc.measure.report.svg import SVG_NAMESPACE, Markup, element, join, number

WIDTH = 460.0
"""Of every chart, in its own units: two fit beside each other on a desk, one on a telephone, both readable."""
HEIGHT = 340.0
AREA = Box(64.0, 16.0, WIDTH - 18, HEIGHT - 50)
"""Where points may lie; around it are ticks and titles."""


def axes(x: Scale, y: Scale, x_title: str, y_title: str) -> Markup:
    """Return grid, ticks and titles. Scales run over `AREA`, y from the bottom."""
    parts = []
    for tick in y.ticks:
        at = y(tick)
        parts.append(line(AREA.left, at, AREA.right, at, "grid"))
        parts.append(text(AREA.left - 7, at + 4, y.label(tick), "tick", "end"))
    for tick in thinned(x):
        at = x(tick)
        parts.append(line(at, AREA.bottom, at, AREA.bottom + 4, "axis"))
        parts.append(text(at, AREA.bottom + 18, x.label(tick), "tick", "middle"))
    parts.append(line(AREA.left, AREA.bottom, AREA.right, AREA.bottom, "axis"))
    parts.append(text((AREA.left + AREA.right) / 2, AREA.bottom + 38, x_title, "axis-title", "middle"))
    parts.append(turned_text(11.0, (AREA.top + AREA.bottom) / 2, y_title, "axis-title"))
    return join(parts)


def thinned(x: Scale) -> list[float]:
    """Return the ticks of a horizontal axis whose labels do not touch each other."""
    kept: list[float] = []
    end = float("-inf")
    for tick in x.ticks:
        half = len(x.label(tick)) * 3.6
        if x(tick) - half > end + 6:
            kept.append(tick)
            end = x(tick) + half
    return kept


def figure(
    chart_id: str,
    title: str,
    description: str,
    drawing: Sequence[Markup],
    table: Markup,
    *,
    height: float = HEIGHT,
    legend: Markup | None = None,
    notes: Sequence[str] = (),
) -> Markup:
    """Return a chart with its caption. `chart_id` is unique on the page; `description` says what can be seen."""
    svg = element(
        "svg",
        {
            "xmlns": SVG_NAMESPACE,
            "viewBox": f"0 0 {number(WIDTH)} {number(height)}",
            "role": "img",
            "aria-labelledby": f"{chart_id}-title {chart_id}-desc",
            "class": "chart",
        },
        element("title", {"id": f"{chart_id}-title"}, title),
        element("desc", {"id": f"{chart_id}-desc"}, description),
        *drawing,
    )
    return element(
        "figure",
        {"id": chart_id},
        element("figcaption", {}, title),
        *([legend] if legend else []),
        svg,
        *(element("p", {"class": "note"}, note) for note in notes),
        element("details", {}, element("summary", {}, "Figures"), element("div", {"class": "scroll"}, table)),
    )


def data_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Markup:
    """Return a table whose first column names the rows."""
    top = element("tr", {}, *(element("th", {"scope": "col"}, cell) for cell in head))
    body = [
        element("tr", {}, element("th", {"scope": "row"}, first), *(element("td", {}, cell) for cell in cells))
        for first, *cells in rows
    ]
    return element("table", {"class": "data"}, element("thead", {}, top), element("tbody", {}, *body))


def figures(value: float | None, spec: str = ",.4g") -> str:
    """Return a number for a table of figures."""
    return "n/a" if value is None else format(value, spec)
