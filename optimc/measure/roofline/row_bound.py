"""The share of what the machine allows that one bench row reached, and what limits it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from optimc.measure.roofline.bound import Limiter, decode_floor, prefill_floor_s
from optimc.measure.roofline.predict import predict_tpot_s
from optimc.measure.roofline.rates import MachineRates
from optimc.measure.roofline.work import PlanWork
from optimc.plan import Plan

if TYPE_CHECKING:
    from optimc.measure.bench_result import BenchResult  # which has a RowBound itself


@dataclass(frozen=True, slots=True)
class RowBound:
    """Floors under one row's figures. Shares are floor over measured median: 1 is as fast as the machine allows."""

    tpot_ms: float | None
    tpot_share: float | None
    """None where the floor does not apply to what was measured; above 1 if the floor was beaten."""
    ttft_ms: float | None
    """None unless one client sent prompts of which nothing was cached."""
    ttft_share: float | None
    limiter: Limiter
    """Of TPOT."""
    predicted_tpot_ms: float | None
    note: str
    """What to know about these figures; "" for nothing."""

    @property
    def is_beaten(self) -> bool:
        """Whether something measured was faster than its floor."""
        return any(share is not None and share > 1 for share in (self.tpot_share, self.ttft_share))

    def to_json(self) -> dict[str, Any]:
        """Return all fields."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RowBound:
        """Inverse of `to_json`. Raises KeyError on anything else."""
        return cls(**{field.name: data[field.name] for field in fields(cls)})

    def __str__(self) -> str:
        if self.tpot_share is None:
            return self.note or "n/a"
        text = f"{self.tpot_share:.0%} of bound, limited by {self.limiter}"
        return f"{text} ({self.note})" if self.note else text


def bound_of(
    plan: Plan, rates: MachineRates, *, max_step_tokens: int | None = None
) -> Callable[[BenchResult], RowBound | None]:
    """Return what gives a bench result of this plan its bound. `max_step_tokens`: the engine's, the plan's by default.

    The result's figures are compared with the floor of its own load: as many sequences as were in flight, as long as
    they were on average.
    """
    work = PlanWork.of(plan)
    most = min(work.max_step_tokens, max_step_tokens or work.max_step_tokens)
    vocab = plan.manifest.model.vocab_size
    return lambda result: _row_bound(result, work, rates, most, vocab)


def _row_bound(result: BenchResult, work: PlanWork, rates: MachineRates, most: int, vocab_size: int) -> RowBound | None:
    tpot_ms, prompt, output = result.tpot_ms.p50, result.prompt_tokens, result.output_tokens
    if prompt is None or output is None:
        return None
    batch, notes = _batch(result)
    # Between its ends a sequence's cache grows evenly, or less where a window clips it: the mean of both is no more
    # than the mean over the answer.
    ends = [decode_floor(work, rates, batch, context) for context in (prompt.low, prompt.low + max(0, output.low - 2))]
    floor_ms = sum(end.seconds for end in ends) / 2 * 1e3
    predicted_ms = None
    if work.program is not None and result.speculation is None:
        predicted_ms = 1e3 * predict_tpot_s(work, rates, batch, prompt.median, output.median, most, vocab_size)
    share = None if tpot_ms is None else floor_ms / tpot_ms
    if result.speculation is not None:
        share = None
        notes.append("several tokens a step: the floor of one token a step does not apply")
    ttft_ms, ttft_share = _ttft(result, work, rates, most)
    if work.program is None:
        notes.append("no program to count: bytes of weights and caches only")
    bound = RowBound(
        tpot_ms=None if tpot_ms is None else floor_ms,
        tpot_share=share,
        ttft_ms=ttft_ms,
        ttft_share=ttft_share,
        limiter=ends[0].limiter,
        predicted_tpot_ms=predicted_ms,
        note="; ".join(notes),
    )
    if bound.is_beaten:
        return replace(bound, note="; ".join(["bound exceeded: rates are stale, measure again with --fresh", *notes]))
    return bound


def _batch(result: BenchResult) -> tuple[int, list[str]]:
    """Return how many sequences shared a step. In an open loop as many as were decoded on average: tokens per second
    times seconds per token, rounded down, as fewer bound less."""
    workload = result.config
    if workload.arrival == "closed":
        return workload.concurrency, []
    rate, tpot_ms = result.output_tokens_per_s_whole_run, result.tpot_ms.p50
    batch = max(1, int(rate * tpot_ms / 1e3)) if rate is not None and tpot_ms is not None else 1
    return batch, [f"open loop: {batch} in flight on average"]


def _ttft(result: BenchResult, work: PlanWork, rates: MachineRates, most: int) -> tuple[float | None, float | None]:
    workload, prompt, measured_ms = result.config, result.prompt_tokens, result.ttft_ms.p50
    if workload.arrival != "closed" or workload.concurrency != 1 or prompt is None or measured_ms is None:
        return None, None
    if result.prefix_hit_rate != 0:  # or unknown
        return None, None
    floor_ms = 1e3 * prefill_floor_s(work, rates, prompt.low, most)
    return floor_ms, floor_ms / measured_ms
