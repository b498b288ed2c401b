"""One plan's figures: those that are known from the store, the others taken and kept one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from optimc.measure.bench import run_bench
from optimc.measure.bench_result import BenchResult
from optimc.measure.compare.config import CompareConfig
from optimc.measure.compare.measurement import Measurement, Origin
from optimc.measure.compare.references import EvalData
from optimc.measure.engine_ladder import climb_ladder
from optimc.measure.evaluation import EvalResult, evaluate
from optimc.measure.machine import Machine
from optimc.measure.served_engine import ServedEngine
from optimc.measure.store import LoadFigures, MeasurementStore, PlanSubject, ladder_key, measurement_key, quality_key
from optimc.measure.workload import Workload
from optimc.progress import Progress

if TYPE_CHECKING:
    from optimc.measure.bench import BoundOf
    from optimc.measure.load.ladder_result import LadderResult


class Bench(Protocol):
    """Runs one benchmark, as `run_bench` does."""

    def __call__(
        self, engine: ServedEngine, workload: Workload, progress: Progress, *, bound: BoundOf | None
    ) -> BenchResult:
        """Return its figures."""
        ...


class Ladder(Protocol):
    """Climbs one ladder, as `run_ladder` does."""

    def __call__(self, engine: ServedEngine, config: CompareConfig, bench: Bench, progress: Progress) -> LadderResult:
        """Return its steps and the knee."""
        ...


@dataclass(frozen=True, slots=True)
class Instruments:
    """What measures; replaced in tests."""

    open_engine: Callable[[Path], ServedEngine]
    bench: Bench
    ladder: Ladder
    bound_for: Callable[[PlanSubject], BoundOf | None]


@dataclass(frozen=True, slots=True)
class Known:
    """A figure from the store or just taken."""

    value: Any
    origin: Origin


class PlanMeasurer:
    """The figures of one plan. What is in the store is read at once; `measure` takes the others."""

    def __init__(
        self, subject: PlanSubject, config: CompareConfig, machine: Machine, store: MeasurementStore, *, fresh: bool
    ) -> None:
        self.subject = subject
        self._config = config
        self._store = store
        switches, repeats = config.switches, {"repeats": config.repeats}
        self._loads = {
            f"bench @{load.concurrency}": (load, measurement_key(subject, load, switches, machine, "bench", repeats))
            for load in config.benches()
        }
        self._quality_key = quality_key(subject, switches, machine, windows=config.windows, length=config.length)
        self._ladder_key = ladder_key(
            subject, config.ladder_workload(), switches, machine, attain=config.attain, rates=config.rates
        )
        self._known: dict[str, Known] = {}
        self._problems: list[str] = []
        if not fresh:
            self._read()

    @property
    def needs_quality(self) -> bool:
        """Whether the quality is not known."""
        return "quality" not in self._known

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to measure."""
        return not self._missing()

    def measure(self, data: EvalData | None, instruments: Instruments, progress: Progress) -> None:
        """Take what is missing on one engine, benchmarks first; `data` is needed if the quality is.

        Raises what opening the engine and measuring raise, StorageError where a figure cannot be kept.
        """

        def labelled(done: int, total: int, label: str) -> None:
            progress(done, total, f"{self.subject.name}: {label}")

        missing = self._missing()
        bound = instruments.bound_for(self.subject)
        engine = instruments.open_engine(self.subject.path)
        try:
            for what, (load, key) in self._loads.items():
                if what in missing:
                    self._keep_load(what, key, instruments.bench(engine, load, labelled, bound=bound))
            if "ladder" in missing:
                found = instruments.ladder(engine, self._config, instruments.bench, labelled)
                self._keep("ladder", self._ladder_key, found, found.to_json())
            if "quality" in missing:
                assert data is not None
                quality = evaluate(engine, data.windows, data.reference, labelled, note=data.note)
                # What could not be compared now may be comparable next time.
                self._keep("quality", self._quality_key, quality, quality.to_json(), save=quality.kl_mean is not None)
        finally:
            engine.close()

    def result(self) -> tuple[Measurement, tuple[str, ...]]:
        """Return all figures, and one sentence per benchmark with too many failures. `measure` comes first."""
        assert self.is_complete, self._missing()
        known = self._known
        measurement = Measurement(
            loads=tuple(known[what].value for what in self._loads),
            quality=known["quality"].value,
            ladder=known["ladder"].value if self._config.ladder else None,
            origins=tuple(known[what].origin for what in self._wanted),
        )
        return measurement, tuple(self._problems)

    @property
    def _wanted(self) -> list[str]:
        return [*self._loads, "quality", *(["ladder"] if self._config.ladder else [])]

    def _missing(self) -> list[str]:
        return [what for what in self._wanted if what not in self._known]

    def _read(self) -> None:
        for what, (_load, key) in self._loads.items():
            self._recall(what, key, LoadFigures.from_json)
        self._recall("quality", self._quality_key, EvalResult.from_json)
        if self._config.ladder:
            from optimc.measure.load.ladder_result import LadderResult

            self._recall("ladder", self._ladder_key, LadderResult.from_json)

    def _recall(self, what: str, key: Mapping[str, Any], parse: Callable[[Mapping[str, Any]], Any]) -> None:
        found = self._store.load_as(key, parse)
        if found is not None:
            value, measured_at = found
            self._known[what] = Known(value, Origin(what, measured_at, cached=True))

    def _keep_load(self, what: str, key: Mapping[str, Any], result: BenchResult) -> None:
        """A run in which too many requests failed is shown, and taken again next time."""
        figures = LoadFigures.of(result)
        self._keep(what, key, figures, figures.to_json(), save=result.ok)
        if not result.ok:
            self._problems.append(
                f"{result.num_failures} of {result.requests} requests failed at concurrency "
                f"{result.config.concurrency}; the most frequent reason: {next(iter(result.failures))}"
            )

    def _keep(
        self, what: str, key: Mapping[str, Any], value: object, data: Mapping[str, Any], *, save: bool = True
    ) -> None:
        measured_at = self._store.save(key, data) if save else datetime.now(UTC).isoformat(timespec="seconds")
        self._known[what] = Known(value, Origin(what, measured_at, cached=False))


def plain_bench(repeats: int) -> Bench:
    """Return what runs a benchmark `repeats` times over."""

    def bench(engine: ServedEngine, workload: Workload, progress: Progress, *, bound: BoundOf | None) -> BenchResult:
        if repeats == 1:
            return run_bench(engine, workload, progress, bound=bound)
        from optimc.measure.load.repeats import repeat_bench

        found = repeat_bench(lambda load: run_bench(engine, load, progress), workload, repeats)
        return found if bound is None else replace(found, bound=bound(found))

    return bench


def plain_ladder(engine: ServedEngine, config: CompareConfig, bench: Bench, progress: Progress) -> LadderResult:
    """Climb a ladder as the configuration asks for it."""
    return climb_ladder(
        engine,
        lambda load: bench(engine, load, progress, bound=None),
        config.ladder_workload(),
        attain=config.attain,
        rates=config.rates,
        progress=progress,
    )
