"""The quality of many plans of one model: the original's logits are recorded once, figures are kept."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from optimc.errors import CheckpointError
from optimc.measure.attribution.engines import OpenEngine
from optimc.measure.evaluation import EvalResult, evaluate, plan_windows
from optimc.measure.machine import Machine
from optimc.measure.reference import RecordedReference, Reference
from optimc.measure.store import EngineSwitches, MeasurementStore, PlanSubject, quality_key
from optimc.plan import Manifest, Plan
from optimc.progress import Progress, no_progress

LoadReference = Callable[[Manifest], Reference]
"""Loads the model a plan was built from. Raises CheckpointError if it is not there."""


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
        self._switches = replace(EngineSwitches(), threads=threads)
        self._fresh = fresh
        self._progress = progress
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._recorded: dict[str, tuple[Reference | None, str | None]] = {}
        self._known: dict[Path, EvalResult] = {}

    def __call__(self, subject: PlanSubject) -> EvalResult:
        """Return the figures of a plan. Raises MeasureError as `evaluate` does."""
        key = quality_key(subject, self._switches, self._machine, windows=self._windows, length=self._length)
        path = self._store.path(key)
        if path not in self._known:
            kept = None if self._fresh else self._store.load_as(key, EvalResult.from_json)
            self._known[path] = self._measure(subject) if kept is None else kept[0]
            if kept is None and self._known[path].kl_mean is not None:
                self._store.save(key, self._known[path].to_json())
        return self._known[path]

    def _measure(self, subject: PlanSubject) -> EvalResult:
        with Plan.open(subject.path) as plan:
            windows = plan_windows(plan, self._windows, self._length)
        reference, note = self._reference(subject, windows)
        engine = self._open_engine(subject.path, self._switches)
        try:
            return evaluate(
                engine,
                windows,
                reference,
                lambda done, total, label: self._progress(done, total, f"{subject.name}: {label}"),
                note=note,
            )
        finally:
            engine.close()

    def _reference(self, subject: PlanSubject, windows: NDArray[np.int32]) -> tuple[Reference | None, str | None]:
        digest = hashlib.sha256(subject.manifest.source.model_hash.encode() + windows.tobytes()).hexdigest()
        if digest not in self._recorded:
            self._recorded[digest] = self._record(subject.manifest, windows, digest)
        return self._recorded[digest]

    def _record(
        self, manifest: Manifest, windows: NDArray[np.int32], digest: str
    ) -> tuple[Reference | None, str | None]:
        try:
            model = self._load_reference(manifest)
        except CheckpointError as error:
            return None, f"no comparison: the original model cannot be loaded ({error})"
        if self._folder is None:
            self._cache_dir.mkdir(parents=True, exist_ok=True)
            self._folder = tempfile.TemporaryDirectory(prefix="reference-", dir=self._cache_dir)
        return RecordedReference.record(model, windows, Path(self._folder.name) / digest, self._progress), None

    def __enter__(self) -> PlanQuality:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._folder is not None:
            self._folder.cleanup()
