"""`optimc attribute`: builds the variants, measures each against the recipe in pairs, and says what each factor gained.

Order: what cannot be measured is found first; then all builds; then quality, plan by plan; then pairs of engines, never
two at work at once. Every block is kept as it ends, so a killed run goes on where it stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from optimc.errors import ConfigError, Fault, MeasureError, OptimcError
from optimc.measure.attribution.attribution import Attribution, Row, RowMode
from optimc.measure.attribution.block import Block
from optimc.measure.attribution.budget import Cost, Fit, fewer_requests, fit
from optimc.measure.attribution.config import AttributeConfig
from optimc.measure.attribution.effect import Difference, Effect
from optimc.measure.attribution.engines import Contender, Engines, OpenEngine, why_too_large
from optimc.measure.attribution.factors import Factor, factors_of, heads_speculation
from optimc.measure.attribution.interaction import interaction
from optimc.measure.attribution.kept_blocks import KeptBlocks
from optimc.measure.attribution.knees import Knees, Ladder
from optimc.measure.attribution.loads import FactorLoads, load_name, loads_of
from optimc.measure.attribution.paired import ORDER, PairFigures, Side, measure_pair
from optimc.measure.attribution.recipe_file import RecipeFile
from optimc.measure.attribution.variants import Step, Variant, cumulative, everything, leave_one_out, variant
from optimc.measure.bench import run_bench
from optimc.measure.bench_result import BenchResult
from optimc.measure.evaluation import EvalResult
from optimc.measure.machine import Machine, available_bytes, read_machine
from optimc.measure.served_engine import ServedEngine
from optimc.measure.store import EngineSwitches, MeasurementStore, PlanSubject, measurement_key
from optimc.measure.workload import Workload
from optimc.progress import Progress, no_progress

Build = Callable[[Variant], Path]
"""Builds a variant's plan, or finds it. Raises OptimcError."""
Bench = Callable[[ServedEngine, Workload, Progress], BenchResult]
Quality = Callable[[PlanSubject], EvalResult]

OVER_BUDGET = "not measured (budget)"


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What an attribution works with; tests give their own."""

    build: Build
    open_engine: OpenEngine
    store: MeasurementStore
    quality: Quality | None = None
    """None: KL is not measured."""
    bench: Bench = run_bench
    ladder: Ladder | None = None
    """None: no knees."""
    machine: Machine | None = None
    available: Callable[[], int | None] = available_bytes
    clock: Callable[[], float] = time.monotonic
    progress: Progress = no_progress


@dataclass(frozen=True, slots=True)
class _Job:
    """A step under one load."""

    mode: RowMode
    step: Step
    workload: Workload
    note: str

    @property
    def name(self) -> str:
        return f"{self.step.factor} ({self.mode})"

    @property
    def load(self) -> str:
        return load_name(self.workload)


def attribute(file: RecipeFile, config: AttributeConfig, around: Surroundings, *, fresh: bool = False) -> Attribution:
    """Measure what each factor of the recipe gains.

    Raises ConfigError before any build for a recipe without factors or lengths beyond its limits; what building and
    measuring the whole recipe raises. A variant that cannot be built or run is a row that says why.
    """
    return _Run(file, config, around, fresh).result()


class _Run:
    def __init__(self, file: RecipeFile, config: AttributeConfig, around: Surroundings, fresh: bool) -> None:
        self._file = file
        self._config = config
        self._around = around
        self._fresh = fresh
        self._machine = around.machine or read_machine()
        self._start = around.clock()
        self._rows: list[Row] = []
        self._method: list[str] = []
        self._plans: dict[str, PlanSubject] = {}
        self._unbuilt: dict[str, str] = {}
        self._qualities: dict[str, EvalResult] = {}
        self._blocks = KeptBlocks(around.store, self._machine, fresh=fresh)
        self._figures: dict[int, PairFigures] = {}
        self._not_alone: list[str] = []
        """Factors that the bare recipe lacks and that cannot be left out alone."""

    def result(self) -> Attribution:
        """Run everything, in the order that the module states."""
        self._check_lengths()
        speculation = self._config.speculation or heads_speculation(self._file.recipe)
        switches = EngineSwitches(speculation=speculation, threads=self._config.threads)
        whole = variant(self._file, (), switches)
        jobs = self._jobs(factors_of(self._file, speculation), switches)
        self._build(whole, jobs)
        jobs = self._buildable(jobs)
        self._measure_quality()
        jobs, pairs = self._fitted(jobs, whole)
        for number, job in enumerate(jobs):
            self._measure(number, job, pairs)
        knees = self._knees(jobs)
        order = {row_mode: place for place, row_mode in enumerate(("without", "cumulative"))}
        rows = sorted(self._rows, key=lambda row: order[row.mode])
        found, notes = interaction(
            {number: (job.step.factor, job.mode, job.workload) for number, job in enumerate(jobs)}, self._figures
        )
        if found and self._not_alone:
            notes.append(f"the interaction holds what was not measured alone: {', '.join(self._not_alone)}")
        return Attribution(
            recipe=self._file.recipe.name,
            base=self._base(whole, jobs),
            rows=(*rows, *knees),
            interaction=found,
            machine=self._machine.to_json(),
            method=(*_how(pairs), *self._method, *notes),
        )

    # What there is to measure

    def _check_lengths(self) -> None:
        """Raise ConfigError, before any build, for lengths beyond what the recipe says."""
        config, most = self._config, self._file.recipe.limits.max_seq_len
        asked = {"prompt and output tokens": config.prompt_tokens + config.output_tokens}
        if config.windows and self._around.quality is not None:
            asked["--length"] = config.length
        faults = [
            Fault(what, f"{tokens} tokens exceed the recipe's limits.max_seq_len {most}; ask for fewer")
            for what, tokens in asked.items()
            if most is not None and tokens > most
        ]
        if faults:
            raise ConfigError("attribution options", faults)

    def _jobs(self, factors: tuple[Factor, ...], switches: EngineSwitches) -> list[_Job]:
        """Return what is to be measured; rows for what cannot be are there at once."""
        config, mode = self._config, self._config.mode
        modes: list[RowMode] = ["without"] if mode != "cumulative" else []
        modes += ["cumulative"] if mode != "leave-one-out" else []
        loads = {factor.name: loads_of(factor.name, config, self._file.recipe.limits) for factor in factors}
        usable: list[Factor] = []
        for factor in factors:
            reason = factor.na or loads[factor.name].na
            if reason is None:
                usable.append(factor)
                continue
            self._rows += [Row(factor.name, factor.kind, each, "", na=reason) for each in modes]
        if not usable:
            raise ConfigError(self._file.recipe.name, [Fault("passes", "nothing can be switched off alone")])
        steps: list[tuple[RowMode, Step]] = []
        if "without" in modes:
            steps += [("without", step) for step in leave_one_out(self._file, usable, switches)]
            if len(usable) > 1:
                steps.append(("without", everything(self._file, usable, switches)))
        if "cumulative" in modes:
            steps += [("cumulative", step) for step in cumulative(self._file, usable, switches)]
        loads["all"] = FactorLoads(config.workloads())
        return [
            _Job(row_mode, step, workload, "; ".join(filter(None, (step.note, loads[step.factor].note))))
            for row_mode, step in steps
            for workload in loads[step.factor].workloads
        ]

    # Builds and quality

    def _build(self, whole: Variant, jobs: list[_Job]) -> None:
        """Build what is needed, the whole recipe first: without it there is nothing to say."""
        self._plans[whole.name] = PlanSubject.open(self._around.build(whole))
        for job in jobs:
            for side in (job.step.with_, job.step.without):
                if side.name in self._plans or side.name in self._unbuilt:
                    continue
                if side.refusal is not None:
                    self._unbuilt[side.name] = f"the recipe is refused: {side.refusal}"
                elif self._is_over():
                    self._unbuilt[side.name] = OVER_BUDGET
                else:
                    self._build_variant(side)

    def _build_variant(self, side: Variant) -> None:
        """A variant that the compiler refuses is a finding, not an end: an int8 body may need its fusions."""
        try:
            subject = PlanSubject.open(self._around.build(side))
        except OptimcError as error:
            self._unbuilt[side.name] = f"cannot be built: {str(error).splitlines()[0]}"
            return
        reason = why_too_large(Contender(subject, side.switches), self._around.available())
        if reason is not None:
            self._unbuilt[side.name] = reason
            return
        self._plans[side.name] = subject

    def _buildable(self, jobs: list[_Job]) -> list[_Job]:
        kept = []
        for job in jobs:
            reasons = [self._unbuilt.get(side.name) for side in (job.step.with_, job.step.without)]
            reason = next((reason for reason in reasons if reason is not None), None)
            if reason is None:
                kept.append(job)
            else:
                self._leave_out(job, reason)
                if job.mode == "without" and job.step.factor not in (*self._not_alone, "all"):
                    self._not_alone.append(job.step.factor)
        return kept

    def _measure_quality(self) -> None:
        quality, budget = self._around.quality, self._config.budget_s
        if quality is None:
            return
        for name, subject in self._plans.items():
            # Half of the time belongs to latency, which is what attribution is for.
            if budget is not None and self._elapsed() > budget / 2:
                missing = [name for name in self._plans if name not in self._qualities]
                self._method.append(f"budget: KL not measured of {', '.join(missing)}")
                return
            self._qualities[name] = quality(subject)

    # Blocks

    def _fitted(self, jobs: list[_Job], whole: Variant) -> tuple[list[_Job], int]:
        """Return what fits in the budget, and how many pairs; the decision is kept, so a resumed run makes the same."""
        budget, pairs = self._config.budget_s, self._config.pairs
        if budget is None or not jobs:
            return jobs, pairs
        details = {"fit": self._config.to_json(), "of": [[job.name, job.load] for job in jobs]}
        key = measurement_key(self._plans[whole.name], None, whole.switches, self._machine, "pair", details)
        kept = None if self._fresh else self._around.store.load(key)
        if kept is None:
            seconds: dict[str, float] = {}
            for job in jobs:
                if job.load not in seconds and not (seconds and self._is_over()):
                    seconds[job.load] = self._first_block(job).seconds
            longest = max(seconds.values())
            costs = [Cost(job.workload, seconds.get(job.load, longest)) for job in jobs]
            found = fit(costs, pairs, max(0.0, budget - self._elapsed()))
            kept = {
                "pairs": found.pairs,
                "most_requests": found.most_requests,
                "measured": found.measured,
                "notes": list(found.notes),
            }
            self._around.store.save(key, kept)
        decided = Fit(kept["pairs"], kept["most_requests"], kept["measured"], tuple(kept["notes"]))
        self._method += decided.notes
        for job in jobs[decided.measured :]:
            self._leave_out(job, OVER_BUDGET)
        fitting = [
            replace(job, workload=fewer_requests(job.workload, decided.most_requests))
            for job in jobs[: decided.measured]
        ]
        return fitting, decided.pairs

    def _measure(self, number: int, job: _Job, pairs: int) -> None:
        if self._is_over():
            self._leave_out(job, OVER_BUDGET)
            return
        progress = self._around.progress
        with self._engines(job) as engines:
            try:
                figures = measure_pair(
                    job.workload,
                    pairs,
                    lambda side, workload: self._bench(engines, side, workload),
                    load=lambda pair, place: self._blocks.load(*self._sides(job), job.workload, pair, place),
                    save=lambda pair, place, block: self._blocks.save(
                        *self._sides(job), job.workload, pair, place, block
                    ),
                    on_block=lambda done, total: progress(done, total, f"{job.name}: {job.load}"),
                )
            except MeasureError as error:
                self._leave_out(job, str(error))
                return
        if figures.failure is not None:
            self._leave_out(job, figures.failure)
            return
        self._figures[number] = figures
        self._rows.append(self._row(job, figures))

    def _engines(self, job: _Job) -> Engines:
        with_, without = self._sides(job)
        return Engines({"with": with_, "without": without}, self._around.open_engine, self._around.available())

    def _sides(self, job: _Job) -> tuple[Contender, Contender]:
        return self._contender(job.step.with_), self._contender(job.step.without)

    def _contender(self, side: Variant) -> Contender:
        return Contender(self._plans[side.name], side.switches)

    def _bench(self, engines: Engines, side: Side, workload: Workload) -> Block:
        engine = engines(side)
        start = self._around.clock()
        result = self._around.bench(engine, workload, no_progress)
        return Block.of(result, self._around.clock() - start)

    def _first_block(self, job: _Job) -> Block:
        """Return the first block of a comparison, which is kept: measuring the comparison goes on from it."""
        block = self._blocks.load(*self._sides(job), job.workload, 0, 0)
        if block is None:
            with self._engines(job) as engines:
                block = self._bench(engines, ORDER[0], job.workload)
            self._blocks.save(*self._sides(job), job.workload, 0, 0, block)
        return block

    # Rows

    def _row(self, job: _Job, figures: PairFigures) -> Row:
        ratios = {metric: figures.ratio(metric) for metric in ("ttft_p50", "tpot_p50", "tokens_per_s")}
        one, other = job.step.with_.name, job.step.without.name
        changes_plan = one != other
        with_, without = self._qualities.get(one), self._qualities.get(other)
        kl, difference = None, None
        if changes_plan and with_ is not None and without is not None:
            difference = Difference.of(with_.kl_windows, without.kl_windows)
            if with_.kl_mean is not None and without.kl_mean is not None:
                kl = (with_.kl_mean, without.kl_mean)
        sizes = (self._plans[one].size_bytes, self._plans[other].size_bytes)
        return Row(
            factor=job.step.factor,
            kind=job.step.kind,
            mode=job.mode,
            workload=job.load,
            metrics={name: None if ratio is None else Effect.of(ratio) for name, ratio in ratios.items()},
            plan_bytes=sizes if changes_plan else None,
            kl=kl,
            kl_difference=difference,
            note=job.note,
            plan=other,
        )

    def _leave_out(self, job: _Job, reason: str) -> None:
        step = job.step
        self._rows.append(Row(step.factor, step.kind, job.mode, job.load, na=reason, note=job.note))

    def _knees(self, jobs: list[_Job]) -> list[Row]:
        """Climb a ladder for every variant that was measured, once each."""
        ladder = self._around.ladder
        if not self._config.knee or ladder is None:
            return []
        knees = Knees(ladder, self._config, self._around.store, self._machine, self._around.open_engine, self._fresh)
        rows, done = [], set()
        for job in jobs:
            if (job.mode, job.step.factor) in done:
                continue
            done.add((job.mode, job.step.factor))
            if self._is_over():
                reason = OVER_BUDGET
                rows.append(Row(job.step.factor, job.step.kind, job.mode, knees.name, na=reason))
                continue
            effect, na = knees.effect(*self._sides(job))
            metrics = {} if effect is None else {"knee": effect}
            rows.append(Row(job.step.factor, job.step.kind, job.mode, knees.name, metrics, na=na))
        return rows

    def _base(self, whole: Variant, jobs: list[_Job]) -> dict[str, Any]:
        """Medians over the whole recipe's blocks."""
        loads: dict[str, dict[str, list[float]]] = {}
        for number, job in enumerate(jobs):
            if number not in self._figures or job.step.with_.removed:
                continue
            load = loads.setdefault(job.load, {"ttft_p50": [], "tpot_p50": [], "tokens_per_s": []})
            for metric, values in load.items():
                values += self._figures[number].values("with", metric) or []
        names = {"ttft_p50": "ttft_p50_ms", "tpot_p50": "tpot_p50_ms", "tokens_per_s": "tokens_per_s"}
        quality = self._qualities.get(whole.name)
        return {
            "plan_bytes": self._plans[whole.name].size_bytes,
            "kl": None if quality is None else quality.kl_mean,
            "loads": {
                shape: {names[metric]: median(values) if values else None for metric, values in load.items()}
                for shape, load in loads.items()
            },
        }

    def _elapsed(self) -> float:
        return self._around.clock() - self._start

    def _is_over(self) -> bool:
        return self._config.budget_s is not None and self._elapsed() >= self._config.budget_s


def _how(pairs: int) -> tuple[str, ...]:
    return (
        f"{pairs} pairs of four blocks (with, without, without, with), never two at once; effect = with / without: "
        "geometric mean over pairs, 95% t-interval over pairs; an interval that holds 1 is no difference seen",
        "KL: mean difference over evaluation windows, paired by window, 95% t-interval",
        "interaction = (whole / bare) / product of each factor's effect when left out alone, 95% t-interval over pairs",
    )
