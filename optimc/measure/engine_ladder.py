"""A ladder of rates on one engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from optimc.measure.bench_result import BenchResult
from optimc.measure.served_engine import ServedEngine
from optimc.measure.workload import Workload
from optimc.progress import Progress, no_progress

if TYPE_CHECKING:
    from optimc.measure.load.ladder_result import LadderResult

MOST_CLIENTS = 16
"""Of the closed loop that shows what is served at all."""


def climb_ladder(
    engine: ServedEngine,
    bench: Callable[[Workload], BenchResult],
    workload: Workload,
    *,
    attain: float,
    rates: Sequence[float] | None = None,
    progress: Progress = no_progress,
) -> LadderResult:
    """Raise the rate, in requests/s, until fewer than a share `attain` of the requests keep the workload's limits.

    `bench` sends one load to the engine. Raises ConfigError, before anything runs, for what no ladder can be made of.
    """
    from optimc.measure.load.ladder import run_ladder

    # More clients than the engine runs at once would wait, and show no more of what it can serve.
    clients = min(MOST_CLIENTS, engine.max_seqs)
    return run_ladder(bench, workload, attain=attain, rates=rates, concurrency=clients, progress=progress)
