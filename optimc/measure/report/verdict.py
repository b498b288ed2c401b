"""The report in one sentence."""

from __future__ import annotations

from collections.abc import Sequence

from optimc.measure.attribution.attribution import Attribution
from optimc.measure.compare.comparison import Comparison
from optimc.measure.compare.row import KL_FLOOR, Row


def verdict(comparison: Comparison) -> str:
    """Return which plan is fastest, what that costs in quality, which is the most faithful, and how many failed."""
    fit = [row for row in comparison.rows if row.costs is not None]
    failed = [row.name for row in comparison.rows if row.problems]
    if not fit:
        reason = "every plan failed a gate or requests" if failed else "no plan has both latency and quality"
        return f"No plan to recommend: {reason}."
    fastest = min(fit, key=_tpot_first)
    faithful = min(fit, key=_quality_first)
    if len(comparison.rows) == 1:
        text = f"{fastest.name} takes {_speed(fastest)} at {_quality(fastest)}"
    elif fastest is faithful:
        text = f"{fastest.name} is the fastest and the most faithful of {len(comparison.rows)} plans: "
        text += f"{_speed(fastest)}, {_quality(fastest)}"
    else:
        text = f"{fastest.name} is the fastest of {len(comparison.rows)} plans that were compared, {_speed(fastest)} "
        text += (
            f"at {_quality(fastest)}; {faithful.name} is the most faithful, {_quality(faithful)} at {_tpot(faithful)}"
        )
    return f"{text}{_failed(failed)}."


def attribution_verdict(attribution: Attribution) -> str:
    """Return what helped the recipe's time per token most, as far as pairs tell."""
    gains = [
        (effect.value, row.factor)
        for row in attribution.rows
        if row.mode == "without" and (effect := row.metrics.get("tpot_p50")) is not None and effect.value < 1
        if effect.high is not None and effect.high < 1
    ]
    if not gains:
        return f"No factor of {attribution.recipe} was seen to change its time per token by itself."
    value, factor = min(gains)
    return f"{factor} helps {attribution.recipe} most: with it, a token takes {value:.2g} times as long as without."


def _failed(names: Sequence[str]) -> str:
    if not names:
        return ""
    return f"; {', '.join(names[:3])}{' and others' if len(names) > 3 else ''} failed a gate or requests"


def _tpot_first(row: Row) -> tuple[float, float]:
    ttft, tpot, _kl = row.costs or (0.0, 0.0, 0.0)
    return tpot, ttft


def _quality_first(row: Row) -> tuple[float, float]:
    _ttft, tpot, kl = row.costs or (0.0, 0.0, 0.0)
    return kl, tpot


def _speed(row: Row) -> str:
    ttft, _tpot_ms, _kl = row.costs or (0.0, 0.0, 0.0)
    return f"{ttft:,.0f} ms to the first token and {_tpot(row)}"


def _tpot(row: Row) -> str:
    return f"{(row.costs or (0.0, 0.0, 0.0))[1]:,.1f} ms per token"


def _quality(row: Row) -> str:
    kl = (row.costs or (0.0, 0.0, 0.0))[2]
    return "a KL of nothing but rounding" if kl <= KL_FLOOR else f"a KL of {kl:.2g} nats"
