"""`optimc compare`: builds what is missing, measures one engine at a time, puts all on one table.

Order: all builds, then the original model's logits (recorded, so that the model is gone before the first engine
loads), then each plan alone on the machine: benchmark at every concurrency, the ladder, then evaluation. Each figure
is kept as it is taken, so that a run that was cut short goes on where it was.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from optimc.errors import MeasureError
from optimc.measure.compare.comparison import Comparison, Row, mark_front
from optimc.measure.compare.config import CompareConfig
from optimc.measure.compare.cost import Price, row_cost
from optimc.measure.compare.gates import failed_gates
from optimc.measure.compare.measure_plan import Bench, Instruments, Ladder, PlanMeasurer, plain_bench, plain_ladder
from optimc.measure.compare.references import LoadReference, References
from optimc.measure.evaluation import load_reference
from optimc.measure.machine import read_machine
from optimc.measure.served_engine import ServedEngine
from optimc.measure.store import MeasurementStore, PlanSubject
from optimc.progress import Progress, no_progress
from optimc.recipe import QualitySpec

if TYPE_CHECKING:
    from optimc.measure.bench import BoundOf

RECIPE_SUFFIXES = (".yaml", ".yml")


def compare(
    items: Sequence[Path],
    config: CompareConfig,
    *,
    build: Callable[[Sequence[Path]], Mapping[Path, Path]],
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

    `build` turns recipes into plans or finds those that are there; `open_engine` loads and starts an engine, which
    is closed before the next is opened. Figures taken earlier for the same bytes, machine and load are used again
    unless `fresh`. `reference_for` loads the model a plan was built from; by default through `load_reference`.
    `bound_for` says how far the machine would let a plan go.

    Raises what building, loading and measuring raise, the first time it happens; what was measured until then is kept.
    """
    if not items:
        raise MeasureError("nothing to compare; name at least one recipe or plan")
    recipes = list(dict.fromkeys(item for item in items if item.suffix.lower() in RECIPE_SUFFIXES))
    built = build(recipes) if recipes else {}
    subjects = [PlanSubject.open(built.get(item, item)) for item in items]
    for subject in subjects:
        check_lengths(subject, config)
    machine = read_machine()
    store = MeasurementStore(cache_dir / "measurements")
    measurers = {s.path: PlanMeasurer(s, config, machine, store, fresh=fresh) for s in subjects}
    instruments = Instruments(
        open_engine, bench or plain_bench(config.repeats), ladder, bound_for or (lambda _subject: None)
    )
    load = reference_for or _default_reference(cache_dir)
    _measure_all([m for m in measurers.values() if not m.is_complete], config, load, cache_dir, instruments, progress)
    rows = [_row(subject, measurers[subject.path], price) for subject in subjects]
    return Comparison(mark_front(_distinct_names(rows)), machine, config, price)


def _measure_all(
    missing: Sequence[PlanMeasurer],
    config: CompareConfig,
    load: LoadReference,
    cache_dir: Path,
    instruments: Instruments,
    progress: Progress,
) -> None:
    cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="reference-", dir=cache_dir) as folder:
        references = References(config.windows, config.length, load, Path(folder), progress)
        prepared = [(each, references.prepare(each.subject) if each.needs_quality else None) for each in missing]
        for measurer, data in prepared:
            measurer.measure(data, instruments, progress)


def _row(subject: PlanSubject, measurer: PlanMeasurer, price: Price | None) -> Row:
    measurement, problems = measurer.result()
    gates = QualitySpec.model_validate(subject.manifest.source.recipe.get("quality") or {})
    return Row(
        name=subject.name,
        path=subject.path,
        size_bytes=subject.size_bytes,
        measurement=measurement,
        problems=(*problems, *failed_gates(gates, measurement.quality)),
        cost=None if price is None else row_cost(price, measurement),
    )


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


def _default_reference(cache_dir: Path) -> LoadReference:
    return lambda manifest: load_reference(manifest, cache_dir=cache_dir)


def _distinct_names(rows: Sequence[Row]) -> list[Row]:
    """Rows of plans that share a name are told apart by their paths."""
    names = [row.name for row in rows]
    return [row if names.count(row.name) == 1 else replace(row, name=f"{row.name} ({row.path})") for row in rows]
