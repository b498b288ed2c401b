"""`optimc attribute`: builds the variants, measures each against the recipe in pairs, and says what each factor gained.

Order: what cannot be measured is found first; then all builds; then quality, plan by plan; then pairs of engines, never
two at work at once. Every block is kept as it ends, so a killed run goes on where it stopped.
"""

from __future__ import annotations

from dataclasses import replace

from optimc.errors import OptimcError
from optimc.measure.attribution.attribution import Attribution, Row
from optimc.measure.attribution.block import Block
from optimc.measure.attribution.budget import Cost, Fit, fewer_requests, fit
from optimc.measure.attribution.config import AttributeConfig
from optimc.measure.attribution.effect import Effect
from optimc.measure.attribution.engines import Contender, Engines, why_too_large
from optimc.measure.attribution.factors import factors_of, heads_speculation
from optimc.measure.attribution.figures import base_figures, measured_row
from optimc.measure.attribution.interaction import interaction
from optimc.measure.attribution.jobs import Job, check_feasible, find_jobs
from optimc.measure.attribution.kept_blocks import KeptBlocks
from optimc.measure.attribution.knees import Knees
from optimc.measure.attribution.paired import ORDER, PairFigures, Side, measure_pair
from optimc.measure.attribution.recipe_file import RecipeFile
from optimc.measure.attribution.surroundings import Surroundings
from optimc.measure.attribution.variants import Variant, variant
from optimc.measure.evaluation import EvalResult
from optimc.measure.finding import reason_of
from optimc.measure.machine import read_machine
from optimc.measure.store import EngineSwitches, PlanSubject, measurement_key
from optimc.measure.workload import Workload
from optimc.progress import no_progress

OVER_BUDGET = "not measured (budget)"


def attribute(file: RecipeFile, config: AttributeConfig, around: Surroundings, *, fresh: bool = False) -> Attribution:
    """Measure what each factor of the recipe gains.

    Raises ConfigError before any build for a recipe without factors, and for what its limits or its lack of heads
    rule out; what building the
    whole recipe and taking its quality raise; StorageError where figures cannot be kept. A variant that cannot be built
    or run is a row that says why.
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
        self._took_s: dict[str, float] = {}
        """The longest that a comparison under each load has taken: one that does not fit any more is not begun."""
        self._not_alone: list[str] = []
        """Factors that the bare recipe lacks and that cannot be left out alone."""

    def result(self) -> Attribution:
        """Run everything, in the order that the module states."""
        check_feasible(self._file.recipe, self._config, has_quality=self._around.quality is not None)
        speculation = self._config.speculation or heads_speculation(self._file.recipe)
        switches = EngineSwitches(speculation=speculation, threads=self._config.threads)
        whole = variant(self._file, (), switches)
        jobs, self._rows = find_jobs(self._file, factors_of(self._file, speculation), self._config, switches)
        self._build(whole, jobs)
        jobs = self._buildable(jobs)
        self._measure_quality(whole)
        jobs, pairs = self._fitted(jobs, whole)
        for number, job in enumerate(jobs):
            self._measure(number, job, pairs)
        knees = self._knees(jobs)
        found, notes = interaction(
            {number: (job.step.factor, job.mode, job.workload) for number, job in enumerate(jobs)}, self._figures
        )
        if found and self._not_alone:
            notes.append(f"the interaction holds what was not measured alone: {', '.join(self._not_alone)}")
        measured = [(jobs[number], figures) for number, figures in self._figures.items()]
        return Attribution(
            recipe=self._file.recipe.name,
            base=base_figures(self._plans[whole.name], self._qualities.get(whole.name), measured),
            rows=(*sorted(self._rows, key=lambda row: row.mode == "cumulative"), *knees),
            interaction=found,
            machine=self._machine.to_json(),
            method=(*_how(pairs), *self._method, *notes),
        )

    # Builds and quality

    def _build(self, whole: Variant, jobs: list[Job]) -> None:
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
            self._unbuilt[side.name] = f"cannot be built: {reason_of(error)}"
            return
        reason = why_too_large(Contender(subject, side.switches), self._around.available())
        if reason is not None:
            self._unbuilt[side.name] = reason
            return
        self._plans[side.name] = subject

    def _buildable(self, jobs: list[Job]) -> list[Job]:
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

    def _measure_quality(self, whole: Variant) -> None:
        quality, budget = self._around.quality, self._config.budget_s
        if quality is None:
            return
        for count, (name, subject) in enumerate(self._plans.items()):
            # Half of the time belongs to latency, which is what attribution is for.
            if budget is not None and self._elapsed() > budget / 2:
                self._method.append(f"budget: KL not measured of {', '.join([*self._plans][count:])}")
                return
            too_large = why_too_large(Contender(subject, whole.switches), self._around.available())
            if too_large is not None:
                self._method.append(f"KL not measured of {name}: {too_large}")
                continue
            try:
                self._qualities[name] = quality(subject)
            except OptimcError as error:
                if name == whole.name:
                    raise
                # Without its smoothing, say, a plan may compute what is no number.
                self._method.append(f"KL not measured of {name}: {reason_of(error)}")

    # Blocks

    def _fitted(self, jobs: list[Job], whole: Variant) -> tuple[list[Job], int]:
        """Return what fits in the budget, and how many pairs; the decision is kept, so a resumed run makes the same."""
        budget, pairs = self._config.budget_s, self._config.pairs
        if budget is None or not jobs:
            return jobs, pairs
        details = {"fit": self._config.to_json(), "of": [[job.name, job.load] for job in jobs]}
        key = measurement_key(self._plans[whole.name], None, whole.switches, self._machine, "pair", details)
        kept = None if self._fresh else self._around.store.load(key)
        if kept is None:
            seconds = self._block_seconds(jobs)
            if not seconds:  # none of them can be run, and measuring says of each why
                return jobs, pairs
            longest = max(seconds.values())
            costs = [Cost(job.workload, seconds.get(job.load, longest)) for job in jobs]
            kept = fit(costs, pairs, max(0.0, budget - self._elapsed())).to_json()
            self._around.store.save(key, kept)
        decided = Fit.from_json(kept)
        self._method += decided.notes
        for job in jobs[decided.measured :]:
            self._leave_out(job, OVER_BUDGET)
        fitting = [
            replace(job, workload=fewer_requests(job.workload, decided.most_requests))
            for job in jobs[: decided.measured]
        ]
        return fitting, decided.pairs

    def _block_seconds(self, jobs: list[Job]) -> dict[str, float]:
        """Return how long a block of each load takes, as far as one can be run and there is time to try."""
        seconds: dict[str, float] = {}
        for job in jobs:
            if job.load in seconds or (seconds and self._is_over()):
                continue
            try:
                seconds[job.load] = self._first_block(job).seconds
            except OptimcError as error:
                reason_of(error)  # raised again if it is of the machine; else told where the comparison is measured
        return seconds

    def _measure(self, number: int, job: Job, pairs: int) -> None:
        if self._is_over(self._took_s.get(job.load, 0.0)):
            self._leave_out(job, OVER_BUDGET)
            return
        progress, start_s = self._around.progress, self._elapsed()
        try:
            with self._engines(job) as engines:
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
        except OptimcError as error:
            self._leave_out(job, reason_of(error))
            return
        if figures.failure is not None:
            self._leave_out(job, figures.failure)
            return
        self._took_s[job.load] = max(self._took_s.get(job.load, 0.0), self._elapsed() - start_s)
        self._figures[number] = figures
        self._rows.append(measured_row(job, figures, self._plans, self._qualities))

    def _engines(self, job: Job) -> Engines:
        with_, without = self._sides(job)
        return Engines({"with": with_, "without": without}, self._around.open_engine, self._around.available())

    def _sides(self, job: Job) -> tuple[Contender, Contender]:
        return self._contender(job.step.with_), self._contender(job.step.without)

    def _contender(self, side: Variant) -> Contender:
        return Contender(self._plans[side.name], side.switches)

    def _bench(self, engines: Engines, side: Side, workload: Workload) -> Block:
        engine = engines(side)
        start = self._around.clock()
        result = self._around.bench(engine, workload, no_progress)
        return Block.of(result, self._around.clock() - start)

    def _first_block(self, job: Job) -> Block:
        """Return the first block of a comparison, which is kept: measuring the comparison goes on from it."""
        block = self._blocks.load(*self._sides(job), job.workload, 0, 0)
        if block is None:
            with self._engines(job) as engines:
                block = self._bench(engines, ORDER[0], job.workload)
            self._blocks.save(*self._sides(job), job.workload, 0, 0, block)
        return block

    def _leave_out(self, job: Job, reason: str) -> None:
        self._rows.append(job.unmeasured(reason))

    # Knees

    def _knees(self, jobs: list[Job]) -> list[Row]:
        """Climb a ladder for both sides of every comparison, once for each engine."""
        ladder = self._around.ladder
        if not self._config.knee or ladder is None:
            return []
        knees = Knees(ladder, self._config, self._around.store, self._machine, self._around.open_engine, self._fresh)
        rows = []
        for job in {(job.mode, job.step.factor): job for job in jobs}.values():
            effect, na = self._knee_effect(knees, job)
            metrics = {} if effect is None else {"knee": effect}
            rows.append(Row(job.step.factor, job.step.kind, job.mode, knees.name, metrics, na=na))
        return rows

    def _knee_effect(self, knees: Knees, job: Job) -> tuple[Effect | None, str | None]:
        if self._is_over():
            return None, OVER_BUDGET
        try:
            return knees.effect(*self._sides(job))
        except OptimcError as error:
            return None, reason_of(error)

    def _elapsed(self) -> float:
        return self._around.clock() - self._start

    def _is_over(self, coming_s: float = 0.0) -> bool:
        """Whether the budget is spent, or `coming_s` more would exceed it."""
        budget, elapsed = self._config.budget_s, self._elapsed()
        return budget is not None and (elapsed >= budget or elapsed + coming_s > budget)


def _how(pairs: int) -> tuple[str, ...]:
    return (
        f"{pairs} pairs of four blocks (with, without, without, with), never two at once; effect = with / without: "
        "geometric mean over pairs, 95% t-interval over pairs; an interval that holds 1 is no difference seen",
        "KL: mean difference over evaluation windows, paired by window, 95% t-interval",
        "interaction = (whole / bare) / product of each factor's effect when left out alone, 95% t-interval over pairs",
    )
