"""Bars: what each factor changed, and measured time beside what the machine allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from optimc.measure.report import scale
from optimc.measure.report.chart import AREA, WIDTH, axes, data_table, figure, figures
from optimc.measure.report.labels import CHARACTER_WIDTH, shorten
from optimc.measure.report.marks import line, text
from optimc.measure.report.scale import Scale
from optimc.measure.report.svg import Markup, element, join

_GUTTER = 24.0
"""Left of the bars: the letter of the load."""
_GAP = 10.0
"""Between them and what is told of them on their right."""
_BAR = 12.0
_STEP = 17.0
_HEAD = 19.0


@dataclass(frozen=True, slots=True)
class RatioBar:
    """One factor's effect under one load: with over without."""

    factor: str
    load: str
    value: float
    low: float | None
    """Ends of the interval; None if there are too few pairs for one."""
    high: float | None
    pairs: int

    @property
    def is_seen(self) -> bool:
        """Whether the interval tells the two apart."""
        return self.low is not None and self.high is not None and not self.low <= 1 <= self.high

    def verdict(self, *, less_is_better: bool) -> str:
        """Return what the ratio means, in words."""
        if not self.is_seen:
            return "no difference seen" if self.low is not None else "too few pairs to tell"
        return "better" if (self.value < 1) == less_is_better else "worse"

    def told(self, *, less_is_better: bool) -> str:
        """Return the ratio and its interval, behind a sign of what they mean."""
        sign = {"better": "▲", "worse": "▼", "no difference seen": "≈"}
        told = f"{sign.get(self.verdict(less_is_better=less_is_better), '?')} ×{self.value:.3g}"
        if self.low is None or self.high is None:
            return told
        return f"{told} ({self.low:.3g} to {self.high:.3g})"


def ratio_bars(chart_id: str, title: str, bars: Sequence[RatioBar], *, less_is_better: bool) -> Markup | None:
    """Return bars from 1 to each ratio on a logarithmic axis, with whiskers; None without any."""
    if not bars:
        return None
    loads = list(dict.fromkeys(bar.load for bar in bars))
    ends = [end for bar in bars for end in (bar.value, bar.low, bar.high) if end is not None and end > 0]
    longest = max(len(bar.told(less_is_better=less_is_better)) for bar in bars)
    x = scale.log([*ends, 1.0, 0.8, 1.25], _GUTTER, WIDTH - longest * CHARACTER_WIDTH - _GAP, count=4)
    factors = list(dict.fromkeys(bar.factor for bar in bars))
    height = 14.0
    drawing: list[Markup] = []
    for factor in factors:
        own = [bar for bar in bars if bar.factor == factor]
        drawing.append(
            element("g", {}, element("title", {}, factor), text(0.0, height + 9, shorten(factor, 46), "name"))
        )
        height += _HEAD
        for bar in own:
            drawing.append(_ratio(bar, x, height, _letter(loads, bar.load), less_is_better=less_is_better))
            height += _STEP
        height += 5
    grid = [line(x(tick), 8.0, x(tick), height, "one" if tick == 1 else "grid") for tick in (*x.ticks, 1.0)]
    grid += [text(x(tick), height + 15, f"×{x.label(tick)}", "tick", "middle") for tick in x.ticks]
    better = "Left of 1 is better." if less_is_better else "Right of 1 is better."
    rows = [
        [b.factor, b.load, f"{b.value:.4g}", figures(b.low), figures(b.high), str(b.pairs), verdict]
        for b, verdict in ((bar, bar.verdict(less_is_better=less_is_better)) for bar in bars)
    ]
    keys = [element("li", {}, element("b", {}, _letter(loads, load)), f" {load}") for load in loads]
    return figure(
        chart_id,
        title,
        f"Ratio with over without, per factor and load, with 95% intervals. {better}",
        [join(grid), *drawing],
        data_table(["factor", "load", "ratio", "low", "high", "pairs", "verdict"], rows),
        height=height + 24,
        legend=element("ul", {"class": "legend"}, *keys),
        notes=[f"With / without. {better} ▲ better, ▼ worse (hollow), ≈ no difference seen (grey), ? too few pairs."],
    )


def _letter(loads: Sequence[str], load: str) -> str:
    return chr(ord("a") + loads.index(load) % 26)


def _ratio(bar: RatioBar, x: Scale, top: float, letter: str, *, less_is_better: bool) -> Markup:
    verdict = bar.verdict(less_is_better=less_is_better)
    css = verdict if bar.is_seen else "unseen"
    one, at, middle = x(1.0), x(bar.value), top + _BAR / 2
    box = {"x": min(one, at), "y": top, "width": max(abs(at - one), 0.8), "height": _BAR, "class": f"bar {css}"}
    parts = [
        element("title", {}, f"{bar.factor}, {bar.load}: ×{bar.value:.3g}, {verdict}"),
        text(4.0, top + _BAR - 1.5, letter, "tick"),
        element("rect", box),
    ]
    if bar.low is not None and bar.high is not None:
        low, high = x(max(bar.low, x.low)), x(min(bar.high, x.high))
        parts += [line(low, middle, high, middle, "whisker")]
        parts += [line(end, middle - 3.5, end, middle + 3.5, "whisker") for end in (low, high)]
    told = bar.told(less_is_better=less_is_better)
    parts.append(text(x.end + _GAP, top + _BAR - 1.5, told, "value"))
    return element("g", {}, *parts)


@dataclass(frozen=True, slots=True)
class BatchBars:
    """TPOT at one batch, in milliseconds."""

    batch: int
    bound_ms: float
    limiter: str
    predicted_ms: float | None
    measured_ms: float | None


def roofline_bars(chart_id: str, title: str, batches: Sequence[BatchBars], context: int) -> Markup | None:
    """Return measured and predicted time per token beside the least the machine allows; None without batches."""
    if not batches:
        return None
    tall = [v for b in batches for v in (b.bound_ms, b.predicted_ms, b.measured_ms) if v is not None]
    y = scale.linear(tall, AREA.bottom, AREA.top, from_zero=True)
    group = (AREA.right - AREA.left) / len(batches)
    width = min(22.0, group * 0.36)
    x = Scale("linear", 0.0, float(len(batches)), AREA.left, AREA.right, ())
    drawing = [axes(x, y, "sequences decoded together", "TPOT, ms")]
    for index, b in enumerate(batches):
        centre = AREA.left + group * (index + 0.5)
        drawing.append(_batch(b, centre, width, y))
        drawing.append(text(centre, AREA.bottom + 18, str(b.batch), "tick", "middle"))
    rows = [
        [str(b.batch), figures(b.measured_ms), figures(b.predicted_ms), figures(b.bound_ms), _share(b), b.limiter]
        for b in batches
    ]
    legend = [
        element("li", {}, element("i", {"class": f"swatch {css}"}), name)
        for css, name in (("measured", "measured"), ("predicted", "predicted"), ("floor", "bound: no faster than this"))
    ]
    return figure(
        chart_id,
        title,
        f"Time per output token at {len(batches)} batch sizes and {context} tokens of context: measured, predicted, "
        "and the least this machine allows.",
        drawing,
        data_table(["batch", "measured ms", "predicted ms", "bound ms", "bound / measured", "limited by"], rows),
        legend=element("ul", {"class": "legend"}, *legend),
        notes=[f"At {context:,} tokens of context. Batches without a solid bar were not measured."],
    )


def _share(bars: BatchBars) -> str:
    return "n/a" if not bars.measured_ms else f"{bars.bound_ms / bars.measured_ms:.0%}"


def _batch(bars: BatchBars, centre: float, width: float, y: Scale) -> Markup:
    parts = [element("title", {}, f"batch {bars.batch}: bound {bars.bound_ms:.3g} ms by {bars.limiter}")]
    for value, left, css in ((bars.measured_ms, centre - width, "measured"), (bars.predicted_ms, centre, "predicted")):
        if value is not None:
            box = {"x": left + 1, "y": y(value), "width": width - 2, "height": y(0.0) - y(value), "class": f"bar {css}"}
            parts.append(element("rect", box))
    at = y(bars.bound_ms)
    parts.append(line(centre - width - 2, at, centre + width + 2, at, "floor"))
    return element("g", {}, *parts)
