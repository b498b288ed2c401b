"""Latency against arrival rate: one line per plan, the limits, and the knee where they break."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from optimc.measure.report import scale
from optimc.measure.report.chart import AREA, axes, data_table, figure, figures
from optimc.measure.report.labels import shorten
from optimc.measure.report.marks import colour_of, key, line, mark, ring, shape_of, text
from optimc.measure.report.svg import Markup, element, join, path

_WIDE = 20.0
"""Largest over smallest value from which on an axis is logarithmic."""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One step of a ladder."""

    rate_per_s: float
    value_ms: float | None
    """None where too few requests gave one."""
    passes: bool


@dataclass(frozen=True, slots=True)
class Curve:
    """One plan's ladder."""

    name: str
    points: tuple[CurvePoint, ...]
    """Rates ascending."""
    knee_per_s: float | None
    told: str
    """The knee in words."""


def curves(
    chart_id: str, title: str, y_title: str, plans: Sequence[Curve], limit_ms: float | None, note: str = ""
) -> Markup | None:
    """Return the chart; None if nothing was measured."""
    values = [p.value_ms for curve in plans for p in curve.points if p.value_ms is not None]
    if not values:
        return None
    rates = [p.rate_per_s for curve in plans for p in curve.points]
    limits = [] if limit_ms is None else [limit_ms]
    x = _axis(rates, AREA.left, AREA.right)
    y = _axis([*values, *limits], AREA.bottom, AREA.top)
    drawing = [axes(x, y, f"requests per second{_log(x)}", f"{y_title}{_log(y)}")]
    if limit_ms is not None:
        at = y(limit_ms)
        drawing.append(line(AREA.left, at, AREA.right, at, "limit"))
        # Above its line, unless that is outside.
        drawing.append(text(AREA.left + 6, at - 6 if at > AREA.top + 16 else at + 16, f"limit {limit_ms:g} ms", "hint"))
    for index, curve in enumerate(plans):
        drawing.append(_drawn(index, curve, x, y))
    rows = [
        [curve.name, figures(p.rate_per_s), figures(p.value_ms), "yes" if p.passes else "no"]
        for curve in plans
        for p in curve.points
    ]
    told = " ".join(f"{curve.name}: {curve.told}." for curve in plans)
    return figure(
        chart_id,
        title,
        f"{y_title} over the arrival rate. {told}",
        drawing,
        data_table(["plan", "requests/s", y_title, "within the limits"], rows),
        legend=_legend(plans),
        notes=[*([note] if note else []), "Hollow: limits broken at this rate. Ring: the knee."],
    )


def _drawn(index: int, curve: Curve, x: scale.Scale, y: scale.Scale) -> Markup:
    css, shape = colour_of(index), shape_of(index)
    places = [(p, x(p.rate_per_s), y(p.value_ms)) for p in curve.points if p.value_ms is not None]
    parts = [element("title", {}, curve.name)]
    if len(places) > 1:
        parts.append(
            element("path", {"d": path((px, py) for _, px, py in places), "class": f"curve {css} d{index % 3}"})
        )
    for point, px, py in places:
        parts.append(mark(shape, px, py, 4.2, css if point.passes else f"hollow {css}"))
        if point.rate_per_s == curve.knee_per_s:
            parts.append(ring(px, py, 9.0))
    return element("g", {}, *parts)


def _legend(plans: Sequence[Curve]) -> Markup:
    entries = [
        element("li", {"title": curve.name}, key(shape_of(i), colour_of(i)), f"{shorten(curve.name, 40)}: {curve.told}")
        for i, curve in enumerate(plans)
    ]
    return element("ul", {"class": "legend rows"}, join(entries))


def _axis(values: Sequence[float], start: float, end: float) -> scale.Scale:
    if min(values) > 0 and max(values) / min(values) > _WIDE:
        return scale.log(values, start, end)
    return scale.linear([*values, max(values) * 1.04], start, end, from_zero=True)


def _log(axis: scale.Scale) -> str:
    return " (log)" if axis.kind == "log" else ""
