"""What the CPU engine has to show, as data, and whether the samples show it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from peer.names import (
    CONCURRENT,
    CONTEXT_LONG,
    CONTEXT_SHORT,
    DECODE,
    EXCESS,
    KL,
    LARGE_DECODE,
    LARGE_PREFILL,
    LLAMA,
    LLAMA_SERVER,
    OPENVINO,
    OPTIMC,
    OUTSIDE,
    PREFILL,
    READY,
)
from peer.samples import Samples

Outcome = Literal["pass", "fail", "not measured"]


@dataclass(frozen=True)
class Verdict:
    """One target's outcome; `figure` is None if it was not measured."""

    target: str
    wanted: str
    figure: float | None
    outcome: Outcome


@dataclass(frozen=True)
class FasterThan:
    """Our speed is at least `factor` times the best of the others'."""

    section: str
    metric: str
    others: tuple[str, ...]
    factor: float

    def judge(self, samples: Samples | None) -> Verdict:
        others = [(self.metric, engine) for engine in self.others]
        return _judge_ratio(samples, self.metric, others, " and ".join(self.others), self.factor)


@dataclass(frozen=True)
class SlowsTo:
    """One of our speeds is at least `factor` times another of ours."""

    section: str
    metric: str
    base: str
    factor: float

    def judge(self, samples: Samples | None) -> Verdict:
        return _judge_ratio(samples, self.metric, [(self.base, OPTIMC)], self.base, self.factor)


@dataclass(frozen=True)
class StaysBelow:
    """The median of one of our figures is below `limit`."""

    section: str
    metric: str
    limit: float
    unit: str

    def judge(self, samples: Samples | None) -> Verdict:
        figure = samples.median(self.metric, OPTIMC) if samples else None
        wanted = f"< {self.limit:g} {self.unit}".strip()
        return Verdict(self.metric, wanted, figure, _outcome(figure, figure is not None and figure < self.limit))


Target = FasterThan | SlowsTo | StaysBelow

TARGETS: Sequence[Target] = (
    FasterThan("decode", DECODE, (LLAMA,), 1.5),
    FasterThan("decode", DECODE, (OPENVINO,), 2.5),
    FasterThan("prefill", PREFILL, (OPENVINO,), 1.2),
    FasterThan("prefill", PREFILL, (LLAMA,), 2.0),
    FasterThan("large", LARGE_DECODE, (LLAMA,), 1.0),
    FasterThan("large", LARGE_PREFILL, (OPENVINO,), 1.2),
    FasterThan("concurrent", CONCURRENT, (LLAMA_SERVER, OPENVINO), 1.5),
    SlowsTo("context", CONTEXT_LONG, CONTEXT_SHORT, 0.6),
    StaysBelow("overhead", OUTSIDE["smollm2", 1], 10.0, "%"),
    StaysBelow("overhead", OUTSIDE["smollm2", 16], 10.0, "%"),
    StaysBelow("overhead", OUTSIDE["llama-587m", 1], 3.0, "%"),
    StaysBelow("serve", READY, 1.0, ""),
    StaysBelow("serve", EXCESS, 100.0, ""),
    StaysBelow("quality", KL, 0.002, ""),
)


def judge(sections: Mapping[str, Samples]) -> list[Verdict]:
    """Return every target's verdict, in order."""
    return [target.judge(sections.get(target.section)) for target in TARGETS]


def _judge_ratio(
    samples: Samples | None, metric: str, others: list[tuple[str, str]], named: str, factor: float
) -> Verdict:
    """Whether ours is at least `factor` times the best of the (metric, engine) others."""
    figure = samples.ratio((metric, OPTIMC), others) if samples else None
    reached = figure is not None and figure >= factor
    return Verdict(f"{metric}, over {named}", f"≥ {factor:g}×", figure, _outcome(figure, reached))


def _outcome(figure: float | None, reached: bool) -> Outcome:
    return "not measured" if figure is None else "pass" if reached else "fail"
