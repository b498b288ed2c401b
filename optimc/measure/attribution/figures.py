"""From blocks and qualities to what an attribution shows: the row of a comparison, the figures of the whole recipe."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from optimc.measure.attribution.attribution import Row
from optimc.measure.attribution.effect import Difference, Effect
from optimc.measure.attribution.jobs import Job
from optimc.measure.attribution.paired import METRICS, Metric, PairFigures
from optimc.measure.evaluation import EvalResult
from optimc.measure.store import PlanSubject

_UNITS: dict[Metric, str] = {"ttft_p50": "ttft_p50_ms", "tpot_p50": "tpot_p50_ms", "tokens_per_s": "tokens_per_s"}
"""How the base's figures are named."""


def measured_row(
    job: Job, figures: PairFigures, plans: Mapping[str, PlanSubject], qualities: Mapping[str, EvalResult]
) -> Row:
    """Return what a comparison found. `plans` and `qualities` are by variant; a quality may be missing."""
    ratios = {metric: figures.ratio(metric) for metric in METRICS}
    with_, without = job.step.with_.name, job.step.without.name
    changes_plan = with_ != without
    found = qualities.get(with_), qualities.get(without)
    kl, difference = None, None
    if changes_plan and found[0] is not None and found[1] is not None:
        difference = Difference.of(found[0].kl_windows, found[1].kl_windows)
        if found[0].kl_mean is not None and found[1].kl_mean is not None:
            kl = (found[0].kl_mean, found[1].kl_mean)
    return Row(
        factor=job.step.factor,
        kind=job.step.kind,
        mode=job.mode,
        workload=job.load,
        metrics={metric: None if ratio is None else Effect.of(ratio) for metric, ratio in ratios.items()},
        plan_bytes=(plans[with_].size_bytes, plans[without].size_bytes) if changes_plan else None,
        kl=kl,
        kl_difference=difference,
        note=job.note,
        plan=without,
    )


def base_figures(
    whole: PlanSubject, quality: EvalResult | None, measured: Iterable[tuple[Job, PairFigures]]
) -> dict[str, Any]:
    """Return the figures of the whole recipe: under each load the medians over its blocks, in ms and tokens/s."""
    loads: dict[str, dict[Metric, list[float]]] = {}
    for job, figures in measured:
        if job.step.with_.removed:
            continue
        load = loads.setdefault(job.load, {metric: [] for metric in METRICS})
        for metric, values in load.items():
            values += figures.values("with", metric) or []
    return {
        "plan_bytes": whole.size_bytes,
        "kl": None if quality is None else quality.kl_mean,
        "loads": {
            shape: {_UNITS[metric]: median(values) if values else None for metric, values in load.items()}
            for shape, load in loads.items()
        },
    }
