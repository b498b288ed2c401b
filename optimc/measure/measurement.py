"""One plan's figures on one machine, and the folder where they are kept between runs."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from optimc.errors import MeasureError
from optimc.measure.bench_result import BenchResult
from optimc.measure.evaluation import EvalResult

MEASUREMENT_VERSION = 1
"""Raise it when a figure's meaning changes; older measurements are then taken again."""


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """What comparison keeps of one benchmark run."""

    concurrency: int
    requests: int
    failures: int
    ttft_p50_ms: float | None
    tpot_p50_ms: float | None
    output_tokens_per_s: float | None
    warnings: tuple[str, ...]

    @classmethod
    def of(cls, result: BenchResult) -> LoadFigures:
        """Pick the figures."""
        return cls(
            concurrency=result.config.concurrency,
            requests=result.requests,
            failures=result.num_failures,
            ttft_p50_ms=result.ttft_ms.p50,
            tpot_p50_ms=result.tpot_ms.p50,
            output_tokens_per_s=result.output_tokens_per_s,
            warnings=result.warnings,
        )


@dataclass(frozen=True, slots=True)
class Measurement:
    """Latency at each concurrency, ascending, and quality."""

    loads: tuple[LoadFigures, ...]
    quality: EvalResult
    measured_at: str
    """UTC, ISO 8601."""

    def to_json(self) -> dict[str, Any]:
        """Return everything, so that `from_json` gives it back."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Measurement:
        """Inverse of `to_json`. Raises KeyError or TypeError on anything else."""
        loads = tuple(LoadFigures(**{**load, "warnings": tuple(load["warnings"])}) for load in data["loads"])
        return cls(loads, EvalResult(**data["quality"]), data["measured_at"])


class MeasurementStore:
    """Measurements by what determines them, one JSON file each. Files are replaced whole, never changed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, key: Mapping[str, Any]) -> Measurement | None:
        """Return the measurement taken under `key`, if there is one. Raises MeasureError if its file is damaged."""
        path = self._path(key)
        if not path.is_file():
            return None
        try:
            return Measurement.from_json(json.loads(path.read_text(encoding="utf-8"))["measurement"])
        except (ValueError, LookupError, TypeError) as error:
            raise MeasureError(f"{path}: not a measurement ({error}); delete it, or measure with --fresh") from error

    def save(self, key: Mapping[str, Any], measurement: Measurement) -> None:
        """Keep the measurement, in place of an earlier one."""
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"key": key, "measurement": measurement.to_json()}, indent=2)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).replace(path)

    def _path(self, key: Mapping[str, Any]) -> Path:
        versioned = json.dumps([MEASUREMENT_VERSION, key], sort_keys=True)
        return self._folder / f"{hashlib.sha256(versioned.encode()).hexdigest()}.json"
