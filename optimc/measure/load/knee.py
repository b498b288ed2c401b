"""The knee: the highest rate at which enough requests are still of use, and what breaks above it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from optimc.measure.bench_result import BenchResult
from optimc.measure.load.slo import LATENCIES, Slo

BrokeFirst = Literal["ttft", "tpot", "e2e", "failure", "backlog", "nothing"]

MEANINGS: dict[BrokeFirst, str] = {
    "ttft": "queueing or scheduling: requests wait before their first token; more sequences, smaller chunks, or "
    "another replica",
    "tpot": "bandwidth: each step serves more sequences than the limit leaves time for; smaller weights or KV, or "
    "fewer sequences",
    "e2e": "whole answers take too long; limit ttft and tpot too, to see which part of them grows",
    "failure": "requests are refused or cut; longer queues hide it only, the rate is above what is served",
    "backlog": "arrivals exceed what is served; no latency holds for long",
    "nothing": "every rate that was tried passes; try higher ones with --rates",
}
"""What it means that a limit broke first."""


@dataclass(frozen=True, slots=True)
class Step:
    """One rate of the ladder."""

    rate_per_s: float
    result: BenchResult
    attained: float
    """Share of requests within every limit."""
    is_stable: bool
    """Whether the number of running requests stopped growing."""
    passes: bool
    reasons: tuple[str, ...]
    """Why it does not pass; empty if it does."""

    @classmethod
    def of(cls, rate_per_s: float, result: BenchResult, attain: float) -> Step:
        """Judge a measurement that has limits and an open loop."""
        assert result.goodput is not None, "a ladder has limits"
        assert result.in_flight_thirds is not None, "a step is an open loop"
        first, _, last = result.in_flight_thirds
        # Twice the noise of a Poisson queue in a short window passes; what grows all the time does not.
        is_stable = last <= 1.5 * first + 2
        reasons = []
        if result.goodput.share < attain:
            reasons.append(f"{result.goodput.share:.1%} within the limits, below {attain:.0%}")
        if not is_stable:
            reasons.append(f"backlog: {first:.1f} requests running at first, {last:.1f} at last")
        return cls(rate_per_s, result, result.goodput.share, is_stable, not reasons, tuple(reasons))

    def attained_of(self, name: str) -> float:
        """Return the share of requests that kept one limit, or did not fail."""
        assert self.result.goodput is not None
        return self.result.goodput.attained(name)

    def to_json(self) -> dict[str, Any]:
        """Return all fields."""
        result = self.result.to_json()
        del result["definitions"]
        return {**{name: getattr(self, name) for name in _STEP_FIELDS}, "reasons": list(self.reasons), "result": result}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Step:
        """Read what `to_json` gave."""
        fields = {name: data[name] for name in _STEP_FIELDS}
        return cls(**fields, reasons=tuple(data["reasons"]), result=BenchResult.from_json(data["result"]))


_STEP_FIELDS = ("rate_per_s", "attained", "is_stable", "passes")


@dataclass(frozen=True, slots=True)
class Knee:
    """Where the ladder breaks: between `rate_per_s`, which passes, and `fails_at_per_s`, which does not."""

    rate_per_s: float | None
    """Highest rate that passes; None if none does."""
    fails_at_per_s: float | None
    """Lowest rate above it that fails; None if none does."""
    broke_first: BrokeFirst
    why: str

    def to_json(self) -> dict[str, Any]:
        """Return all fields."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Knee:
        """Read what `to_json` gave."""
        return cls(**data)

    def __str__(self) -> str:
        if self.rate_per_s is None:
            return f"no rate passes; the lowest tried was {self.fails_at_per_s:.3g}/s"
        if self.fails_at_per_s is None:
            return f"at least {self.rate_per_s:.3g}/s"
        return f"{self.rate_per_s:.3g}/s (passes; {self.fails_at_per_s:.3g}/s does not)"


def find_knee(steps: Sequence[Step], slo: Slo, attain: float) -> Knee:
    """Return the knee of at least one step. Of several measurements of a rate the last one counts."""
    latest = {step.rate_per_s: step for step in steps}
    ordered = [latest[rate] for rate in sorted(latest)]
    passing = max((step.rate_per_s for step in ordered if step.passes), default=None)
    failing = [step for step in ordered if not step.passes and (passing is None or step.rate_per_s > passing)]
    if not failing:
        return Knee(passing, None, "nothing", MEANINGS["nothing"])
    name, step = _broke_first(failing, slo, attain)
    return Knee(passing, failing[0].rate_per_s, name, f"{_figures(name, step, slo)}; {MEANINGS[name]}")


def _broke_first(failing: Sequence[Step], slo: Slo, attain: float) -> tuple[BrokeFirst, Step]:
    """Return the latency that is missed at the lowest rate; at the same one, the one furthest above its limit.

    A backlog and failures come with every overload: they are named only where no latency is missed.
    """
    for step in failing:
        missed = [name for name in slo.limited if step.attained_of(name) < attain]
        if missed:
            return max(missed, key=lambda name: _excess(name, step, slo)), step
    for step in failing:
        if step.attained_of("failure") < attain:
            return "failure", step
    for step in failing:
        if not step.is_stable:
            return "backlog", step
    # Each limit by itself is kept often enough, all of them together are not.
    step = failing[0]
    names: tuple[BrokeFirst, ...] = (*slo.limited, "failure")
    return min(names, key=step.attained_of), step


def _excess(name: str, step: Step, slo: Slo) -> float:
    """Return p90 over limit."""
    p90, limit = getattr(step.result, f"{name}_ms").p90, slo.limit_ms(name)
    return 0.0 if p90 is None or limit is None else p90 / limit


def _figures(name: BrokeFirst, step: Step, slo: Slo) -> str:
    """Return what was seen."""
    rate = f"{step.rate_per_s:.3g}/s"
    if name == "failure":
        reason = next(iter(step.result.failures))
        return f"{1 - step.attained_of(name):.1%} of requests fail at {rate}, most with: {reason}"
    if name == "backlog":
        return step.reasons[-1] + f" ({rate})"
    assert name in LATENCIES
    p90 = getattr(step.result, f"{name}_ms").p90
    seen = "" if p90 is None else f" (p90 {p90:,.1f} ms)"
    return f"at {rate} {step.attained_of(name):.1%} of requests keep {name} <= {slo.limit_ms(name):g} ms{seen}"
