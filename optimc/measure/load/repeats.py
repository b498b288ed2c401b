"""The same load several times: each run keeps its own percentiles, and what differs between runs is shown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from optimc.measure.bench_result import BenchResult, TokenRange
from optimc.measure.load.goodput import Goodput
from optimc.measure.load.interval import Interval, t_interval
from optimc.measure.percentile import Distribution
from optimc.measure.workload import Workload

_DISTRIBUTIONS = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms", "queue_ms", "lag_ms")
_RATES = (
    *("cold_ttft_ms", "output_tokens_per_s", "output_tokens_per_s_whole_run", "requests_per_s"),
    *("prefill_tokens_per_s", "prefix_hit_rate"),
)


def repeat_bench(bench: Callable[[Workload], BenchResult], workload: Workload, repeats: int) -> BenchResult:
    """Run a load `repeats` times, and put the runs together as `across_runs` does."""
    return across_runs([bench(workload) for _ in range(repeats)])


def across_runs(results: Sequence[BenchResult]) -> BenchResult:
    """Return medians over runs of each run's figure, with t-intervals over runs from three on.

    Samples of different runs are never pooled: a slow run would look like a slow share of requests. Requests and
    failures are summed; "n" of a percentile is that of all runs.
    """
    first = results[0]
    if len(results) == 1:
        return first
    intervals: dict[str, Interval] = {}
    changed: dict[str, Any] = {}
    for name in _DISTRIBUTIONS:
        runs: list[Distribution] = [getattr(result, name) for result in results]
        middles = {}
        for q in ("p50", "p90", "p99"):
            middles[q] = _middle(f"{name}.{q}", [getattr(run, q) for run in runs], intervals)
        changed[name] = Distribution(**middles, n=sum(run.n for run in runs))
    for name in _RATES:
        changed[name] = _middle(name, [getattr(result, name) for result in results], intervals)
    failures: Counter[str] = Counter()
    for result in results:
        failures.update(result.failures)
    thirds = [result.in_flight_thirds for result in results if result.in_flight_thirds is not None]
    return replace(
        first,
        **changed,
        requests=sum(result.requests for result in results),
        failures=dict(failures.most_common()),
        prompt_tokens=_range([result.prompt_tokens for result in results]),
        output_tokens=_range([result.output_tokens for result in results]),
        wall_s=sum(result.wall_s for result in results),
        warnings=tuple(dict.fromkeys(warning for result in results for warning in result.warnings)),
        goodput=_goodput([result.goodput for result in results if result.goodput is not None]),
        intervals=intervals,
        in_flight_end=max(result.in_flight_end for result in results),
        in_flight_thirds=_thirds(thirds),
        not_sent=sum(result.not_sent for result in results),
        runs=len(results),
    )


def _middle(name: str, values: Sequence[float | None], intervals: dict[str, Interval]) -> float | None:
    """Return the median, and note the interval; None if any run has no value."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    interval = t_interval(known)
    if interval is not None:
        intervals[name] = interval
    return median(known)


def _range(ranges: Sequence[TokenRange | None]) -> TokenRange | None:
    known = [each for each in ranges if each is not None]
    if len(known) < len(ranges):
        return None
    middle = sorted(each.median for each in known)[len(known) // 2]
    return TokenRange(min(each.low for each in known), middle, max(each.high for each in known))


def _goodput(runs: Sequence[Goodput]) -> Goodput | None:
    """Add the counts; the rate is the median of the runs'."""
    if not runs:
        return None
    broken = {name: sum(run.broken[name] for run in runs) for name in runs[0].broken}
    met, of = sum(run.met for run in runs), sum(run.of for run in runs)
    return Goodput(met, of, median(run.per_s for run in runs), broken)


def _thirds(runs: Sequence[tuple[float, float, float]]) -> tuple[float, float, float] | None:
    if not runs:
        return None
    first, second, last = (median(column) for column in zip(*runs, strict=True))
    return first, second, last
