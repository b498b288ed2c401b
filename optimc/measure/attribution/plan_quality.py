"""The quality of many plans of one model: the original's logits are recorded once, figures are kept."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from optimc.measure.attribution.engines import OpenEngine
from optimc.measure.compare.references import EvalData, LoadReference, References
from optimc.measure.evaluation import EvalResult, evaluate
from optimc.measure.machine import Machine
from optimc.measure.store import EngineSwitches, MeasurementStore, PlanSubject, quality_key
from optimc.progress import Progress, no_progress


class PlanQuality:
    """Evaluates plans one at a time, like `optimc compare`, and takes from the store what was measured before.

    A context: leaving it removes the recorded logits.
    """

    def __init__(
        self,
        *,
        windows: int,
        length: int,
        cache_dir: Path,
        store: MeasurementStore,
        machine: Machine,
        open_engine: OpenEngine,
        load_reference: LoadReference,
        threads: int | None = None,
        fresh: bool = False,
        progress: Progress = no_progress,
    ) -> None:
        self._windows = windows
        self._length = length
        self._cache_dir = cache_dir
        self._store = store
        self._machine = machine
        self._open_engine = open_engine
        self._load_reference = load_reference
        # Scoring guesses nothing; and these are the switches under which compare files its figures.
        self._switches = EngineSwitches(threads=threads)
        self._fresh = fresh
        self._progress = progress
        self._scratch = ExitStack()
        self._references: References | None = None
        self._known: dict[Path, EvalResult] = {}

    def __call__(self, subject: PlanSubject) -> EvalResult:
        """Return the figures of a plan. Raises what opening and evaluating it raises."""
        key = quality_key(subject, self._switches, self._machine, windows=self._windows, length=self._length)
        path = self._store.path(key)
        if path not in self._known:
            kept = None if self._fresh else self._store.load_as(key, EvalResult.from_json)
            self._known[path] = self._measure(subject) if kept is None else kept[0]
            if kept is None and self._known[path].kl_mean is not None:
                self._store.save(key, self._known[path].to_json())
        return self._known[path]

    def _measure(self, subject: PlanSubject) -> EvalResult:
        data = self._data(subject)
        engine = self._open_engine(subject.path, self._switches)
        try:
            return evaluate(
                engine,
                data.windows,
                data.reference,
                lambda done, total, label: self._progress(done, total, f"{subject.name}: {label}"),
                note=data.note,
            )
        finally:
            engine.close()

    def _data(self, subject: PlanSubject) -> EvalData:
        if self._references is None:
            from optimc_passes.cache_entry import scratch_folder

            folder = self._scratch.enter_context(scratch_folder(self._cache_dir))
            self._references = References(self._windows, self._length, self._load_reference, folder, self._progress)
        return self._references.prepare(subject)

    def __enter__(self) -> PlanQuality:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._scratch.close()
