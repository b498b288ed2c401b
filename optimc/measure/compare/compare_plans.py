"""`optimc compare`: builds what is missing, measures one engine at a time, puts all on one table.

Order: all builds, then the original model's logits (recorded, so that the model is gone before the first engine
loads), then each plan alone on the machine: benchmark at every concurrency, the ladder, then evaluation. Each figure
is kept as it is taken, so that a run that was cut short goes on where it was. A plan that fails is told as failed; the
others are measured all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from optimc.errors import MeasureError, OptimcError
from optimc.measure.compare.comparison import Comparison, mark_front
from optimc.measure.compare.config import CompareConfig
from optimc.measure.compare.cost import Price, row_cost
from optimc.measure.compare.failure import Failure
from optimc.measure.compare.gates import failed_gates
from optimc.measure.compare.measure_plan import Bench, Instruments, Ladder, PlanMeasurer, plain_bench, plain_ladder
from optimc.measure.compare.references import LoadReference, References
from optimc.measure.compare.row import Row
from optimc.measure.evaluation import load_reference
from optimc.measure.finding import reason_of
from optimc.measure.machine import Machine, read_machine
from optimc.measure.served_engine import ServedEngine
from optimc.measure.store import MeasurementStore, PlanSubject
from optimc.progress import Progress, no_progress
from optimc.recipe import QualitySpec
from optimc.wording import one_line

if TYPE_CHECKING:
    from optimc.measure.bench import BoundOf

RECIPE_SUFFIXES = (".yaml", ".yml")


def compare(
    items: Sequence[Path],
    config: CompareConfig,
    *,
    build: Callable[[Sequence[Path]], Mapping[Path, Path | Failure]],
    open_engine: Callable[[Path], ServedEngine],
    cache_dir: Path,
    fresh: bool = False,
    price: Price | None = None,
    progress: Progress = no_progress,
    reference_for: LoadReference | None = None,
    bench: Bench | None = None,
    ladder: Ladder = plain_ladder,
    bound_for: Callable[[PlanSubject], BoundOf | None] | None = None,
) -> Comparison:
    """Compare recipes (by suffix .yaml or .yml) and plans.

    `build` turns recipes into plans, finds those that are there, or says why there is none; `open_engine` loads and
    starts an engine, which is closed before the next is opened. Figures taken earlier for the same bytes, machine and
    load are used again unless `fresh`. `reference_for` loads the model a plan was built from; by default through
    `load_reference`. `bound_for` says how far the machine would let a plan go.

    Raises PlanError for what is no plan and MeasureError for lengths beyond a plan's, before anything is measured;
    StorageError where figures cannot be kept; MeasureError if no plan has figures in the end.
    """
    if not items:
        raise MeasureError("nothing to compare; name at least one recipe or plan")
    recipes = list(dict.fromkeys(item for item in items if item.suffix.lower() in RECIPE_SUFFIXES))
    built = build(recipes) if recipes else {}
    found = [built.get(item, item) for item in items]
    subjects = [PlanSubject.open(path) for path in found if isinstance(path, Path)]
    for subject in subjects:
        check_lengths(subject, config)
    machine = read_machine()
    instruments = Instruments(
        open_engine, bench or plain_bench(config.repeats), ladder, bound_for or (lambda _subject: None)
    )
    run = _Run(config, machine, MeasurementStore(cache_dir / "measurements"), instruments, progress)
    run.prepare(subjects, fresh=fresh)
    run.measure(reference_for or _default_reference(cache_dir), cache_dir)
    failures = (*(each for each in found if isinstance(each, Failure)), *run.failures.values())
    rows = [run.row(subject, price) for subject in subjects if subject.path not in run.failures]
    if not rows:
        raise MeasureError("\n".join(dict.fromkeys(map(str, failures))))
    return Comparison(mark_front(_distinct_names(rows)), machine, config, price, tuple(dict.fromkeys(failures)))


class _Run:
    """All plans' figures, and what kept some of them from having any."""

    def __init__(
        self,
        config: CompareConfig,
        machine: Machine,
        store: MeasurementStore,
        instruments: Instruments,
        progress: Progress,
    ) -> None:
        self.failures: dict[Path, Failure] = {}
        """By the plan's path."""
        self._config = config
        self._machine = machine
        self._store = store
        self._instruments = instruments
        self._progress = progress
        self._measurers: dict[Path, PlanMeasurer] = {}
        self._gates: dict[Path, QualitySpec] = {}

    def prepare(self, subjects: Sequence[PlanSubject], *, fresh: bool) -> None:
        """Look up what is known of each plan."""
        for subject in subjects:
            try:
                self._gates[subject.path] = _gates(subject)
                self._measurers[subject.path] = PlanMeasurer(
                    subject, self._config, self._machine, self._store, fresh=fresh
                )
            except OptimcError as error:
                self._failed(subject, error)

    def measure(self, load: LoadReference, cache_dir: Path) -> None:
        """Take what is missing: the originals' logits first, then plan by plan."""
        from optimc_passes.cache_entry import scratch_folder

        missing = [measurer for measurer in self._measurers.values() if not measurer.is_complete]
        # A reference may take gigabytes: what a killed run left of one is removed by the next that uses the cache.
        with scratch_folder(cache_dir) as folder:
            references = References(self._config.windows, self._config.length, load, folder, self._progress)
            prepared = []
            for measurer in missing:
                try:
                    data = references.prepare(measurer.subject) if measurer.needs_quality else None
                except OptimcError as error:
                    self._failed(measurer.subject, error)
                else:
                    prepared.append((measurer, data))
            for measurer, data in prepared:
                try:
                    measurer.measure(data, self._instruments, self._progress)
                except OptimcError as error:
                    self._failed(measurer.subject, error)

    def row(self, subject: PlanSubject, price: Price | None) -> Row:
        """Return the row of a plan that has not failed."""
        measurement, problems = self._measurers[subject.path].result()
        return Row(
            name=subject.name,
            path=subject.path,
            size_bytes=subject.size_bytes,
            measurement=measurement,
            problems=(*problems, *failed_gates(self._gates[subject.path], measurement.quality)),
            cost=None if price is None else row_cost(price, measurement),
        )

    def _failed(self, subject: PlanSubject, error: OptimcError) -> None:
        self.failures[subject.path] = Failure(subject.name, subject.path, reason_of(error))


def check_lengths(subject: PlanSubject, config: CompareConfig) -> None:
    """Raise MeasureError, before anything is measured, if the plan's sequences are too short for what is asked."""
    most = subject.manifest.limits.max_seq_len
    asked = {
        f"{config.prompt_tokens} prompt + {config.output_tokens} output tokens": (
            config.prompt_tokens + config.output_tokens
        ),
        f"evaluation windows of {config.length} tokens": config.length,
    }
    for what, tokens in asked.items():
        if tokens > most:
            raise MeasureError(f"{subject.name}: {what} exceed the plan's max_seq_len {most}; ask for fewer")


def _gates(subject: PlanSubject) -> QualitySpec:
    try:
        return QualitySpec.model_validate(subject.manifest.source.recipe.get("quality") or {})
    except ValueError as error:  # pydantic's, for a plan of another version of optimc
        raise MeasureError(f"the quality gates of its recipe cannot be read ({one_line(error)}); rebuild it") from error


def _default_reference(cache_dir: Path) -> LoadReference:
    return lambda manifest: load_reference(manifest, cache_dir=cache_dir)


def _distinct_names(rows: Sequence[Row]) -> list[Row]:
    """Rows of plans that share a name are told apart by their paths."""
    names = [row.name for row in rows]
    return [row if names.count(row.name) == 1 else replace(row, name=f"{row.name} ({row.path})") for row in rows]
