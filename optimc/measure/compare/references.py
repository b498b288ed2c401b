"""The original models' logits on the evaluation windows, recorded once per model and tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from optimc.errors import CheckpointError
from optimc.measure.evaluation import plan_windows
from optimc.measure.reference import RecordedReference, Reference
from optimc.measure.store import PlanSubject
from optimc.plan import Manifest, Plan
from optimc.progress import Progress

LoadReference = Callable[[Manifest], Reference]
"""Loads the model a plan was built from. Raises CheckpointError if it is not there."""


@dataclass(frozen=True, slots=True)
class EvalData:
    """What a plan is evaluated on."""

    windows: NDArray[np.int32]
    """[W, T]."""
    reference: Reference | None
    note: str | None
    """Why there is no reference."""


class References:
    """Evaluation data for each plan. Logits lie in `folder`, so that no model is in memory beside an engine."""

    def __init__(self, windows: int, length: int, load: LoadReference, folder: Path, progress: Progress) -> None:
        self._shape = windows, length
        self._load = load
        self._folder = folder
        self._progress = progress
        self._known: dict[str, tuple[Reference | None, str | None]] = {}

    def prepare(self, subject: PlanSubject) -> EvalData:
        """Return the data of a plan; the model is loaded when its logits are not recorded yet."""
        with Plan.open(subject.path) as plan:
            windows = plan_windows(plan, *self._shape)
        digest = hashlib.sha256(subject.manifest.source.model_hash.encode() + windows.tobytes()).hexdigest()
        if digest not in self._known:
            self._known[digest] = self._record(subject, windows, digest)
        return EvalData(windows, *self._known[digest])

    def _record(
        self, subject: PlanSubject, windows: NDArray[np.int32], digest: str
    ) -> tuple[Reference | None, str | None]:
        try:
            model = self._load(subject.manifest)
        except CheckpointError as error:
            return None, f"no comparison: the original model cannot be loaded ({error})"
        return RecordedReference.record(model, windows, self._folder / digest, self._progress), None
