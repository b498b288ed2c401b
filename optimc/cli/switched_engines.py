"""What attribute and search measure with: engines under chosen switches, their ladders, their plans' quality."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optimc.measure.attribution.plan_quality import PlanQuality
    from optimc.measure.machine import Machine
    from optimc.measure.served_engine import ServedEngine
    from optimc.measure.store import EngineSwitches, MeasurementStore
    from optimc.measure.workload import Workload
    from optimc.progress import Progress


def open_switched(plan: Path, switches: EngineSwitches) -> ServedEngine:
    """Load and start an engine with these switches; with speculation it first measures its steps."""
    from optimc.cli.engine_options import load_engine
    from optimc_runtime.config import SpeculationOptions

    return load_engine(
        plan,
        max_seqs=switches.max_seqs,
        max_step_tokens=switches.max_step_tokens,
        threads=switches.threads,
        prefix_cache=switches.prefix_cache,
        chunked_prefill=switches.chunked_prefill,
        inflight_batching=switches.inflight_batching,
        speculation=SpeculationOptions.parse(switches.speculation),
    )


def climb(engine: ServedEngine, workload: Workload, attain: float) -> Mapping[str, Any]:
    """Raise the load until the workload's limits break; return the ladder as JSON."""
    from optimc.measure.bench import run_bench
    from optimc.measure.engine_ladder import climb_ladder

    return climb_ladder(engine, lambda load: run_bench(engine, load), workload, attain=attain).to_json()


def plan_quality(
    cache: Path,
    store: MeasurementStore,
    machine: Machine,
    *,
    windows: int,
    length: int,
    threads: int | None,
    fresh: bool,
    progress: Progress,
) -> PlanQuality:
    """Return what evaluates plans against the model they were built from, on `windows` windows of `length` tokens."""
    from optimc.measure.attribution.plan_quality import PlanQuality
    from optimc.measure.evaluation import load_reference

    return PlanQuality(
        windows=windows,
        length=length,
        cache_dir=cache,
        store=store,
        machine=machine,
        open_engine=open_switched,
        load_reference=lambda manifest: load_reference(manifest, cache_dir=cache),
        threads=threads,
        fresh=fresh,
        progress=progress,
    )
