"""The report in one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from optimc.measure.attribution.attribution import Attribution
from optimc.measure.compare.comparison import Comparison
from optimc.measure.compare.row import KL_FLOOR


@dataclass(frozen=True, slots=True)
class _Eligible:
    """A plan that may be recommended, and its costs."""

    name: str
    ttft_ms: float
    tpot_ms: float
    kl: float

    @property
    def tpot(self) -> str:
        return f"{self.tpot_ms:,.1f} ms per token"

    @property
    def speed(self) -> str:
        return f"{self.ttft_ms:,.0f} ms to the first token and {self.tpot}"

    @property
    def quality(self) -> str:
        return "a KL of nothing but rounding" if self.kl <= KL_FLOOR else f"a KL of {self.kl:.2g} nats"


def verdict(comparison: Comparison) -> str:
    """Return which plan is fastest, what that costs in quality, which is the most faithful, and how many failed."""
    plans = [_Eligible(row.name, *row.costs) for row in comparison.rows if row.costs is not None]
    unfit = [row.name for row in comparison.rows if row.problems]
    failed = _listed("; ", unfit, " failed a gate or requests")
    failed += _listed("; no figures of ", [failure.name for failure in comparison.failures], "")
    if not plans and len(unfit) == len(comparison.rows):
        return "No plan to recommend: every plan failed a gate or requests."
    if not plans:
        return f"No plan to recommend: no plan has both latency and quality{failed}."
    fastest = min(plans, key=lambda plan: (plan.tpot_ms, plan.ttft_ms))
    faithful = min(plans, key=lambda plan: (plan.kl, plan.tpot_ms))
    count = len(comparison.rows)
    if count == 1:
        text = f"{fastest.name} takes {fastest.speed} at {fastest.quality}"
    elif fastest is faithful:
        text = f"{fastest.name} is the fastest and the most faithful of {count} plans: "
        text += f"{fastest.speed}, {fastest.quality}"
    else:
        text = f"{fastest.name} is the fastest of {count} plans that were compared, {fastest.speed} at "
        text += f"{fastest.quality}; {faithful.name} is the most faithful, {faithful.quality} at {faithful.tpot}"
    return f"{text}{failed}."


def attribution_verdict(attribution: Attribution) -> str:
    """Return which single factor helped the recipe's time per token most, as far as pairs tell."""
    gains = [
        (effect.value, row.factor)
        for row in attribution.rows
        if row.mode == "without" and row.kind != "all" and (effect := row.metrics.get("tpot_p50")) is not None
        if effect.high is not None and effect.high < 1
    ]
    if not gains:
        return f"No factor of {attribution.recipe} was seen to shorten its time per token by itself."
    value, factor = min(gains)
    return f"{factor} helps {attribution.recipe} most: with it, a token takes {value:.2g} times as long as without."


def _listed(before: str, names: Sequence[str], after: str) -> str:
    if not names:
        return ""
    return f"{before}{', '.join(names[:3])}{' and others' if len(names) > 3 else ''}{after}"
