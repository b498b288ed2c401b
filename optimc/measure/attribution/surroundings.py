"""What an attribution works with."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from optimc.measure.attribution.engines import OpenEngine
from optimc.measure.attribution.knees import Ladder
from optimc.measure.attribution.variants import Variant
from optimc.measure.bench import run_bench
from optimc.measure.bench_result import BenchResult
from optimc.measure.evaluation import EvalResult
from optimc.measure.machine import Machine, available_bytes
from optimc.measure.served_engine import ServedEngine
from optimc.measure.store import MeasurementStore, PlanSubject
from optimc.measure.workload import Workload
from optimc.progress import Progress, no_progress

Build = Callable[[Variant], Path]
"""Builds a variant's plan, or finds it. Raises OptimcError."""
Bench = Callable[[ServedEngine, Workload, Progress], BenchResult]
Quality = Callable[[PlanSubject], EvalResult]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """How plans are made, run and measured, and where figures are kept; tests give their own."""

    build: Build
    open_engine: OpenEngine
    store: MeasurementStore
    quality: Quality | None = None
    """None: KL is not measured."""
    bench: Bench = run_bench
    ladder: Ladder | None = None
    """None: no knees."""
    machine: Machine | None = None
    """None: this one."""
    available: Callable[[], int | None] = available_bytes
    """Free memory in bytes, if the machine says."""
    clock: Callable[[], float] = time.monotonic
    """Seconds."""
    progress: Progress = no_progress
