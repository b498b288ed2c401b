"""One point: recipe, plan, quality, and only if that holds, the load."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optimc.errors import ConfigError, OptimcError
from optimc.measure.bench import run_bench
from optimc.measure.bench_result import BenchResult
from optimc.measure.compare.cost import cost_per_million
from optimc.measure.compare.gates import failed_gates
from optimc.measure.evaluation import EvalResult
from optimc.measure.finding import faults_in_line, reason_of
from optimc.measure.machine import Machine
from optimc.measure.search.search_result import Trial
from optimc.measure.search.space import Parameters, Space, overrides_of, switches_of
from optimc.measure.served_engine import ServedEngine
from optimc.measure.store import (
    EngineSwitches,
    LoadFigures,
    MeasurementStore,
    PlanSubject,
    ladder_key,
    measurement_key,
)
from optimc.measure.workload import Workload
from optimc.progress import Progress, no_progress
from optimc.recipe import QualitySpec, Recipe

Build = Callable[[Sequence[str]], Path]
"""From overrides to the plan. Raises OptimcError."""
Check = Callable[[tuple[str, ...]], Recipe]
"""From overrides to the checked recipe. Raises ConfigError."""
Bench = Callable[[ServedEngine, Workload, Progress], BenchResult]
Ladder = Callable[[ServedEngine, Workload, float], Mapping[str, Any]]
"""Returns `LadderResult.to_json()`."""


@dataclass(frozen=True, slots=True)
class TrialRunner:
    """What a trial works with; tests give their own."""

    space: Space
    workload: Workload
    check: Check
    build: Build
    open_engine: Callable[[Path, EngineSwitches], ServedEngine]
    quality: Callable[[PlanSubject], EvalResult]
    store: MeasurementStore
    machine: Machine
    bench: Bench = run_bench
    ladder: Ladder | None = None
    attain: float = 0.95
    price_per_hour: float | None = None
    """Of the machine; for objective "cost"."""
    switches: EngineSwitches = field(default_factory=EngineSwitches)
    fresh: bool = False
    progress: Progress = no_progress

    def __call__(self, parameters: Parameters) -> Trial:
        """Measure a point. A point that cannot be built or run is a trial that says why.

        Raises StorageError and MissingExtraError: what the machine lacks is no fault of the point, which would never be
        tried again.
        """
        overrides = overrides_of(parameters)
        try:
            recipe = self.check(overrides)
        except ConfigError as error:
            return Trial(parameters, "refused", reason=faults_in_line(error))
        try:
            return self._measured(parameters, recipe, PlanSubject.open(self.build(overrides)))
        except OptimcError as error:
            return Trial(parameters, "failed", reason=reason_of(error))

    def _measured(self, parameters: Parameters, recipe: Recipe, subject: PlanSubject) -> Trial:
        quality = self.quality(subject)
        known: dict[str, Any] = {
            "kl": quality.kl_mean,
            "plan_bytes": subject.size_bytes,
            "plan": subject.name,
        }
        gates = failed_gates(recipe.quality, quality)
        if gates:
            return Trial(
                parameters, "gate", reason="; ".join(gates), violation=violation(recipe.quality, quality), **known
            )
        switches = switches_of(parameters, self.switches)
        if self.space.objective == "knee":
            knee = self._knee(subject, switches)
            if knee is None:
                return Trial(parameters, "failed", reason="no rate keeps the limits", **known)
            return Trial(parameters, "measured", knee, **known)
        figures = self._load(subject, switches)
        if figures.failures:
            reason = f"{figures.failures} of {figures.requests} requests failed"
            return Trial(parameters, "failed", reason=reason, **known)
        value = self._figure(figures)
        if value is None:
            return Trial(parameters, "failed", reason=f"the run was too short for {self.space.objective}", **known)
        return Trial(parameters, "measured", value, **known)

    def _figure(self, figures: LoadFigures) -> float | None:
        match self.space.objective:
            case "ttft_p50_ms":
                return figures.ttft_p50_ms
            case "tpot_p50_ms":
                return figures.tpot_p50_ms
            case "tokens_per_s":
                return figures.output_tokens_per_s
        assert self.price_per_hour is not None, "the command has asked for it"
        rate = figures.output_tokens_per_s
        return None if not rate else cost_per_million(self.price_per_hour, rate)

    def _load(self, subject: PlanSubject, switches: EngineSwitches) -> LoadFigures:
        """Take the figures from the store, where `optimc compare` keeps them too, or measure."""
        key = measurement_key(subject, self.workload, switches, self.machine, "bench", {"repeats": 1})
        found = None if self.fresh else self.store.load_as(key, LoadFigures.from_json)
        if found is not None:
            return found[0]
        engine = self.open_engine(subject.path, switches)
        try:
            figures = LoadFigures.of(self.bench(engine, self.workload, self.progress))
        finally:
            engine.close()
        if not figures.failures:
            self.store.save(key, figures.to_json())
        return figures

    def _knee(self, subject: PlanSubject, switches: EngineSwitches) -> float | None:
        key = ladder_key(subject, self.workload, switches, self.machine, attain=self.attain)
        found = None if self.fresh else self.store.load(key)
        if found is None:
            assert self.ladder is not None, "given with the objective knee"
            engine = self.open_engine(subject.path, switches)
            try:
                found = self.ladder(engine, self.workload, self.attain)
            finally:
                engine.close()
            self.store.save(key, found)
        rate = found["knee"]["rate_per_s"]
        return None if rate is None else float(rate)


def violation(gates: QualitySpec, quality: EvalResult) -> float:
    """Return by how much the worst gate is missed, as a share of its limit; 0 if all hold. What was not measured misses
    by the whole limit, and so does what is no number: a sampler must not be drawn there."""
    missed = [0.0]
    ratio = None
    if quality.reference_perplexity is not None:
        ratio = quality.perplexity / quality.reference_perplexity
    for limit, value in ((gates.max_kl, quality.kl_mean), (gates.max_perplexity_ratio, ratio)):
        if limit is not None:
            missed.append(1.0 if value is None or not math.isfinite(value) else value / limit - 1)
    if gates.min_top1 is not None:
        top1 = quality.top1_agreement
        missed.append(1.0 if top1 is None or gates.min_top1 == 0 else 1 - top1 / gates.min_top1)
    return max(missed)
