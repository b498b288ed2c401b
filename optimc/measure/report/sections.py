"""The report's sections, each a list of figures made from what was measured; an empty list is no section."""

from __future__ import annotations

from optimc.measure.attribution.attribution import METRICS, Attribution, RowMode
from optimc.measure.compare.comparison import Comparison
from optimc.measure.compare.row import KL_FLOOR, Row
from optimc.measure.load.ladder_result import LadderResult
from optimc.measure.report.bars import BatchBars, RatioBar, ratio_bars, roofline_bars
from optimc.measure.report.chart import data_table
from optimc.measure.report.curves import Curve, CurvePoint, curves
from optimc.measure.report.report import Report
from optimc.measure.report.scatter import ScatterPoint, State, scatter
from optimc.measure.report.svg import Markup, element
from optimc.measure.roofline.roofline import Roofline

_MODES: dict[RowMode, str] = {"without": "alone", "cumulative": "one upon the other"}
_MORE_IS_BETTER = frozenset({"tokens_per_s", "knee"})


def comparison_table(comparison: Comparison) -> Markup:
    """Return the table of all plans, every figure in view."""
    columns = comparison.columns
    names = [column.head.replace("perplexity", "ppl") for column in columns]
    heads = [
        element("th", {"scope": "col"}, "plan"),
        *(
            element("th", {"scope": "col", "title": column.meaning or None}, name)
            for name, column in zip(names, columns, strict=True)
        ),
        element("th", {"scope": "col"}, "standing"),
    ]
    body = [
        element(
            "tr",
            {"class": _standing(row)[0]},
            element("th", {"scope": "row", "title": str(row.path)}, row.name),
            *(element("td", {}, column.cell(row)) for column in columns),
            element("td", {"class": "standing"}, _standing(row)[1]),
        )
        for row in comparison.rows
    ]
    return element(
        "table",
        {"class": "plans"},
        element("thead", {}, element("tr", {}, *heads)),
        element("tbody", {}, *body),
    )


def _standing(row: Row) -> tuple[State, str]:
    """Return the row's class and its standing in words, with the sign the terminal shows."""
    if row.problems:
        return "failed", "✗ failed"
    return ("front", "● front") if row.on_front else ("off", "–")


def scatters(comparison: Comparison) -> list[Markup]:
    """Return quality against time per token and against time to first token."""
    found = []
    for name, title in (("tpot", "Time per token against quality"), ("ttft", "Time to first token against quality")):
        points = [
            ScatterPoint(
                row.name,
                getattr(row.measurement.loads[0], f"{name}_p50_ms"),
                None if row.measurement.quality.kl_mean is None else max(KL_FLOOR, row.measurement.quality.kl_mean),
                row.size_bytes,
                _standing(row)[0],
            )
            for row in comparison.rows
        ]
        found.append(scatter(f"scatter-{name}", title, f"{name.upper()} p50, ms", points, KL_FLOOR))
    return [figure for figure in found if figure is not None]


def ladder_curves(report: Report) -> list[Markup]:
    """Return TTFT and TPOT against the arrival rate."""
    ladders = report.ladders
    if not ladders:
        return []
    percentile = "p99" if all(ladder.percentile == "p99" for ladder in ladders.values()) else "p90"
    note = "" if percentile == "p99" else "p90: some steps have too few requests for a p99."
    found = []
    for name, title in (("ttft", "Time to first token as load rises"), ("tpot", "Time per token as load rises")):
        limits = {ladder.slo.limit_ms(name) for ladder in ladders.values()}
        plans = [
            Curve(
                plan,
                tuple(
                    CurvePoint(s.rate_per_s, getattr(getattr(s.result, f"{name}_ms"), percentile), s.passes)
                    for s in ladder.steps
                ),
                ladder.knee.rate_per_s,
                _knee(ladder),
            )
            for plan, ladder in ladders.items()
        ]
        y_title = f"{name.upper()} {percentile}, ms"
        found.append(curves(f"ladder-{name}", title, y_title, plans, limits.pop() if len(limits) == 1 else None, note))
    return [figure for figure in found if figure is not None]


def _knee(ladder: LadderResult) -> str:
    knee = ladder.knee
    if knee.rate_per_s is None:
        return f"no rate passes, {knee.broke_first} broke first"
    if knee.fails_at_per_s is None:
        return f"knee at or above {knee.rate_per_s:.3g}/s, nothing broke"
    return f"knee {knee.rate_per_s:.3g}/s, {knee.broke_first} broke first at {knee.fails_at_per_s:.3g}/s"


def knee_reasons(report: Report) -> list[str]:
    """Return what broke and what that means, a sentence per plan."""
    return [f"{plan}: {ladder.knee.why}." for plan, ladder in report.ladders.items()]


def attribution_bars(attribution: Attribution) -> list[Markup]:
    """Return one chart per mode and metric."""
    found = []
    for mode, how in _MODES.items():
        for metric, name in METRICS.items():
            bars = [
                RatioBar(row.factor, row.workload, effect.value, effect.low, effect.high, effect.pairs)
                for row in attribution.rows
                if row.mode == mode and (effect := row.metrics.get(metric)) is not None
            ]
            chart_id = f"attribution-{mode}-{metric.replace('_', '-')}"
            less = metric not in _MORE_IS_BETTER
            found.append(ratio_bars(chart_id, f"{name}: each factor {how}", bars, less_is_better=less))
    return [figure for figure in found if figure is not None]


def attribution_table(attribution: Attribution) -> Markup | None:
    """Return what the factors did to the plan's size and quality; None if nothing is known of it."""
    rows = [
        [
            row.factor,
            _MODES[row.mode],
            "" if row.plan_bytes is None else f"{row.plan_bytes[0] / 1e6:,.1f} / {row.plan_bytes[1] / 1e6:,.1f}",
            "" if row.kl is None else f"{row.kl[0]:.3g} / {row.kl[1]:.3g}",
        ]
        for row in attribution.rows
        if row.plan_bytes is not None or row.kl is not None
    ]
    unique = [list(row) for row in dict.fromkeys(tuple(row) for row in rows)]
    return data_table(["factor", "mode", "MB with / without", "KL with / without"], unique) if unique else None


def unmeasured(attribution: Attribution) -> list[tuple[str, str]]:
    """Return each factor that was not measured, and why, once for all loads."""
    found = [(f"{row.factor} ({_MODES[row.mode]})", row.na) for row in attribution.rows if row.na is not None]
    return list(dict.fromkeys(found))


def roofline_charts(report: Report) -> list[Markup]:
    """Return one chart per plan: TPOT at each batch, at the context nearest to what was measured."""
    found = []
    for index, (plan, roofline) in enumerate(report.rooflines.items()):
        rows = [] if report.comparison is None else [row for row in report.comparison.rows if row.name == plan]
        measured = {load.concurrency: load.tpot_p50_ms for row in rows for load in row.measurement.loads}
        context = _context(report.comparison, roofline)
        batches = [
            BatchBars(
                cell.batch, cell.bound.tpot_ms, cell.bound.limiter, cell.predicted_tpot_ms, measured.get(cell.batch)
            )
            for cell in roofline.cells
            if cell.context == context
        ]
        found.append(roofline_bars(f"roofline-{index}", plan, batches, context))
    return [figure for figure in found if figure is not None]


def _context(comparison: Comparison | None, roofline: Roofline) -> int:
    """Return the context that is nearest to the middle of the answers that were measured."""
    contexts = sorted({cell.context for cell in roofline.cells}) or [0]
    if comparison is None:
        return contexts[0]
    wanted = comparison.config.prompt_tokens + comparison.config.output_tokens // 2
    return min(contexts, key=lambda context: (abs(context - wanted), context))
