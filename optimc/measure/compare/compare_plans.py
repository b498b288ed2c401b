"""`optimc compare`: builds what is missing, measures one engine at a time, puts all on one table.

Order: all builds, then the original model's logits (recorded, so that the model is gone before the first engine
loads), then each plan alone on the machine: benchmark at every concurrency, then evaluation.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optimc.errors import CheckpointError, ConfigError, Fault, MeasureError
from optimc.measure.bench import run_bench
from optimc.measure.bench_result import BenchResult
from optimc.measure.compare.comparison import Comparison, Row, mark_front
from optimc.measure.compare.gates import failed_gates
from optimc.measure.compare.measurement import Measurement
from optimc.measure.evaluation import evaluate, load_reference, plan_windows
from optimc.measure.machine import Machine, read_machine
from optimc.measure.reference import RecordedReference, Reference
from optimc.measure.served_engine import ServedEngine
from optimc.measure.store import EngineSwitches, LoadFigures, MeasurementStore, PlanSubject, measurement_key
from optimc.measure.workload import Workload
from optimc.plan import Manifest, Plan
from optimc.progress import Progress, no_progress
from optimc.recipe import QualitySpec

RECIPE_SUFFIXES = (".yaml", ".yml")

LoadReference = Callable[[Manifest], Reference]
Bench = Callable[[ServedEngine, Workload, Progress], BenchResult]


@dataclass(frozen=True, slots=True)
class CompareConfig:
    """How every plan is measured. Raises ConfigError with all faults at once."""

    prompt_tokens: int = 512
    output_tokens: int = 128
    concurrencies: tuple[int, ...] = (1, 8)
    """Ascending; TTFT and TPOT in the table are those of the first."""
    requests: int | None = None
    """Measured at each concurrency; None as in Workload, and never fewer than the concurrency."""
    warmup_requests: int | None = None
    seed: int = 0
    threads: int | None = None
    """What `open_engine` gives the engines; here because figures of other thread counts are other figures."""
    windows: int = 16
    """Evaluation windows."""
    length: int = 512
    """Tokens per evaluation window."""

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in zip(self.concurrencies, self.concurrencies[1:], strict=False))
        rules = [
            ("concurrencies", bool(self.concurrencies) and ascending, "at least one, ascending"),
            ("windows", self.windows >= 1, "at least 1"),
            ("length", self.length >= 2, "at least 2"),
        ]
        faults = [Fault(name, f"must be {rule}, got {getattr(self, name)}") for name, ok, rule in rules if not ok]
        if faults:
            raise ConfigError("comparison options", faults)
        self.benches()

    def benches(self) -> list[Workload]:
        """Return the benchmark of each concurrency."""
        base = Workload(
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            warmup_requests=self.warmup_requests,
            seed=self.seed,
        )
        requests = self.requests
        return [
            replace(base, concurrency=c, requests=None if requests is None else max(requests, c))
            for c in self.concurrencies
        ]

    @property
    def setting(self) -> str:
        """The lengths, for the reader."""
        return (
            f"{self.prompt_tokens} prompt + {self.output_tokens} output tokens, "
            f"quality over {self.windows} × {self.length} tokens"
        )


@dataclass(frozen=True, slots=True)
class _Subject:
    """A plan to be measured, and what determines the result."""

    plan: PlanSubject
    key: Mapping[str, Any]


def compare(
    items: Sequence[Path],
    config: CompareConfig,
    *,
    build: Callable[[Path], Path],
    open_engine: Callable[[Path], ServedEngine],
    cache_dir: Path,
    fresh: bool = False,
    progress: Progress = no_progress,
    reference_for: LoadReference | None = None,
    bench: Bench = run_bench,
) -> Comparison:
    """Compare recipes (by suffix .yaml or .yml) and plans.

    `build` turns a recipe into a plan or finds the one that is there; `open_engine` loads and starts an engine, which
    is closed before the next is opened. Figures taken earlier for the same bytes, machine and configuration are used
    again unless `fresh`. `reference_for` loads the model a plan was built from; by default through `load_reference`.

    Raises what building, loading and measuring raise, the first time it happens; what was measured until then is kept.
    """
    if not items:
        raise MeasureError("nothing to compare; name at least one recipe or plan")
    if reference_for is None:
        reference_for = _default_reference(cache_dir)
    paths = [build(item) if item.suffix.lower() in RECIPE_SUFFIXES else item for item in items]
    machine = read_machine()
    subjects = [_subject(path, config, machine) for path in paths]
    for subject in subjects:
        _check_lengths(subject, config)
    store = MeasurementStore(cache_dir / "measurements")
    known: dict[Path, Measurement] = {}
    for subject in subjects:
        found = None if fresh else store.load_as(subject.key, Measurement.from_json)
        if found is not None:
            known[subject.plan.path] = found[0]
    missing = list({s.plan.path: s for s in subjects if s.plan.path not in known}.values())
    taken: dict[Path, tuple[Measurement, tuple[str, ...]]] = {}
    cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="reference-", dir=cache_dir) as folder:
        references = _References(config, reference_for, Path(folder), progress)
        prepared = [(subject, references.prepare(subject)) for subject in missing]
        for subject, data in prepared:
            measurement, problems = _measure(subject, data, config, open_engine, bench, progress)
            taken[subject.plan.path] = measurement, problems
            # What could not be compared now may be comparable next time.
            if not problems and measurement.quality.kl_mean is not None:
                store.save(subject.key, measurement.to_json())
    rows = []
    for subject in subjects:
        cached = subject.plan.path in known
        measurement, problems = (known[subject.plan.path], ()) if cached else taken[subject.plan.path]
        gates = QualitySpec.model_validate(subject.plan.manifest.source.recipe.get("quality") or {})
        problems = (*problems, *failed_gates(gates, measurement.quality))
        rows.append(Row(subject.plan.name, subject.plan.path, subject.plan.size_bytes, measurement, cached, problems))
    return Comparison(mark_front(_distinct_names(rows)), machine, config.setting)


def _subject(path: Path, config: CompareConfig, machine: Machine) -> _Subject:
    plan = PlanSubject.open(path)
    switches = EngineSwitches(threads=config.threads)
    return _Subject(plan, measurement_key(plan, None, switches, machine, "compare", {"config": asdict(config)}))


def _check_lengths(subject: _Subject, config: CompareConfig) -> None:
    """Raise MeasureError, before anything is measured, if the plan's sequences are too short for what is asked."""
    most = subject.plan.manifest.limits.max_seq_len
    asked = {
        f"{config.prompt_tokens} prompt + {config.output_tokens} output tokens": (
            config.prompt_tokens + config.output_tokens
        ),
        f"evaluation windows of {config.length} tokens": config.length,
    }
    for what, tokens in asked.items():
        if tokens > most:
            raise MeasureError(f"{subject.plan.name}: {what} exceed the plan's max_seq_len {most}; ask for fewer")


@dataclass(frozen=True, slots=True)
class _EvalData:
    windows: NDArray[np.int32]
    reference: Reference | None
    note: str | None


class _References:
    """Evaluation data for each plan; the original's logits are recorded once per model and tokens."""

    def __init__(self, config: CompareConfig, load: LoadReference, folder: Path, progress: Progress) -> None:
        self._config = config
        self._load = load
        self._folder = folder
        self._progress = progress
        self._known: dict[str, tuple[Reference | None, str | None]] = {}

    def prepare(self, subject: _Subject) -> _EvalData:
        with Plan.open(subject.plan.path) as plan:
            windows = plan_windows(plan, self._config.windows, self._config.length)
        digest = hashlib.sha256(subject.plan.manifest.source.model_hash.encode() + windows.tobytes()).hexdigest()
        if digest not in self._known:
            self._known[digest] = self._record(subject, windows, digest)
        return _EvalData(windows, *self._known[digest])

    def _record(
        self, subject: _Subject, windows: NDArray[np.int32], digest: str
    ) -> tuple[Reference | None, str | None]:
        try:
            model = self._load(subject.plan.manifest)
        except CheckpointError as error:
            return None, f"no comparison: the original model cannot be loaded ({error})"
        return RecordedReference.record(model, windows, self._folder / digest, self._progress), None


def _measure(
    subject: _Subject,
    data: _EvalData,
    config: CompareConfig,
    open_engine: Callable[[Path], ServedEngine],
    bench: Bench,
    progress: Progress,
) -> tuple[Measurement, tuple[str, ...]]:
    def labelled(done: int, total: int, label: str) -> None:
        progress(done, total, f"{subject.plan.name}: {label}")

    engine = open_engine(subject.plan.path)
    try:
        results = [bench(engine, bench_config, labelled) for bench_config in config.benches()]
        quality = evaluate(engine, data.windows, data.reference, labelled, note=data.note)
    finally:
        engine.close()
    problems = tuple(
        f"{r.num_failures} of {r.requests} requests failed at concurrency {r.config.concurrency}; "
        f"the most frequent reason: {next(iter(r.failures))}"
        for r in results
        if not r.ok
    )
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return Measurement(tuple(LoadFigures.of(result) for result in results), quality, now), problems


def _default_reference(cache_dir: Path) -> LoadReference:
    return lambda manifest: load_reference(manifest, cache_dir=cache_dir)


def _distinct_names(rows: Sequence[Row]) -> list[Row]:
    """Rows of plans that share a name are told apart by their paths."""
    names = [row.name for row in rows]
    return [row if names.count(row.name) == 1 else replace(row, name=f"{row.name} ({row.path})") for row in rows]
