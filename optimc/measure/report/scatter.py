"""Latency against quality: one mark per plan, labelled, the Pareto front joined."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from optimc.measure.compare.pareto import pareto_front
from optimc.measure.report import scale
from optimc.measure.report.chart import AREA, axes, data_table, figure, figures
from optimc.measure.report.labels import Point, place_labels, short_names
from optimc.measure.report.marks import key, line, mark, text
from optimc.measure.report.svg import Markup, element, join, path

State = Literal["front", "off", "failed"]

_LARGEST = 11.0
"""Radius of the largest plan's mark; areas are as the sizes, but no mark is too small to be seen."""
_SMALLEST = 4.0
_SHAPES: dict[State, tuple[str, str]] = {
    "front": ("circle", "c0"),
    "off": ("circle", "hollow c0"),
    "failed": ("cross", "failed"),
}
_MEANINGS: dict[State, str] = {
    "front": "on the front of TTFT, TPOT and KL together",
    "off": "another plan is better",
    "failed": "fails a gate",
}


@dataclass(frozen=True, slots=True)
class ScatterPoint:
    """One plan."""

    name: str
    x: float | None
    """Milliseconds; None if it was not measured."""
    y: float | None
    """KL in nats per token, at least the floor; None if it was not measured."""
    size_bytes: int
    state: State


def scatter(chart_id: str, title: str, x_title: str, points: Sequence[ScatterPoint], kl_floor: float) -> Markup | None:
    """Return the chart; None if no plan has both figures. Low and left is better."""
    shown = [point for point in points if point.x is not None and point.y is not None]
    if not shown:
        return None
    at = [(float(point.x or 0), float(point.y or 0)) for point in shown]
    across = [x for x, _ in at]
    # Marks and labels need room beside the outermost points.
    x = scale.linear([0.0, max(across) * 1.06], AREA.left, AREA.right)
    y = scale.log([value for _, value in at], AREA.bottom, AREA.top)
    labels = short_names([point.name for point in shown])
    largest = max(point.size_bytes for point in shown)
    marks = [
        Point(x(px), y(py), max(_SMALLEST, _LARGEST * math.sqrt(point.size_bytes / largest)), label)
        for point, (px, py), label in zip(shown, at, labels, strict=True)
    ]
    drawing = [
        axes(x, y, x_title, "KL to the original, nats per token (log)"),
        text(AREA.left + 6, AREA.bottom - 8, "↙ better", "hint"),
        _front_line(shown, at, x, y),
    ]
    places = place_labels(marks, AREA)
    for place, target in zip(places, marks, strict=True):
        if place.is_far:
            middle = (place.box.top + place.box.bottom) / 2
            nearest = min(max(target.x, place.box.left), place.box.right)
            drawing.append(line(target.x, target.y, nearest, middle, "leader"))
    for point, drawn in zip(shown, marks, strict=True):
        shape, css = _SHAPES[point.state]
        told = f"{point.name}: {point.x:,.4g} ms, KL {point.y:.3g}, {point.size_bytes / 1e6:,.1f} MB"
        radius = min(drawn.radius, 6.0) if shape == "cross" else drawn.radius
        drawing.append(element("g", {}, element("title", {}, told), mark(shape, drawn.x, drawn.y, radius, css)))
    drawing += [text(place.x, place.y, target.label, "label") for place, target in zip(places, marks, strict=True)]
    absent = [f"Not shown: {p.name} ({_missing(p)} not measured)." for p in points if p not in shown]
    floored = [f"KL at {kl_floor:g}: equal but for rounding."] if min(py for _, py in at) <= kl_floor else []
    rows = [
        [p.name, figures(p.x), figures(p.y, ".3g"), f"{p.size_bytes / 1e6:,.1f}", _MEANINGS[p.state]] for p in points
    ]
    return figure(
        chart_id,
        title,
        f"{len(shown)} plans by latency and quality; low and left is better. " + _front_names(shown),
        drawing,
        data_table(["plan", x_title, "KL, nats per token", "MB", "standing"], rows),
        legend=_legend({point.state for point in shown}),
        notes=["Area of a mark: size of the plan. Line: nothing is better in both.", *floored, *absent],
    )


def _missing(point: ScatterPoint) -> str:
    return " and ".join(name for name, value in (("latency", point.x), ("KL", point.y)) if value is None)


def _front_names(points: Sequence[ScatterPoint]) -> str:
    names = [point.name for point in points if point.state == "front"]
    return f"On the front: {', '.join(names)}." if names else "No plan is on the front."


def _front_line(
    shown: Sequence[ScatterPoint], at: Sequence[tuple[float, float]], x: scale.Scale, y: scale.Scale
) -> Markup:
    """Return the steps between plans that nobody beats in these two figures, failed ones left out."""
    fit = [place for point, place in zip(shown, at, strict=True) if point.state != "failed"]
    best = sorted({place for place, is_best in zip(fit, pareto_front(fit), strict=True) if is_best})
    corners: list[tuple[float, float]] = []
    for px, py in best:
        if corners:
            corners.append((x(px), corners[-1][1]))
        corners.append((x(px), y(py)))
    return element("path", {"d": path(corners), "class": "front"}) if len(corners) > 1 else Markup("")


def _legend(states: set[State]) -> Markup:
    entries = [element("li", {}, key(*_SHAPES[state]), _MEANINGS[state]) for state in _SHAPES if state in states]
    return element("ul", {"class": "legend"}, join(entries))
