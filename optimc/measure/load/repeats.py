"""The same load several times: each run keeps its own percentiles, and what differs between runs is shown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, get_args

from optimc.measure.bench_result import DISTRIBUTIONS, BenchResult, TokenRange
from optimc.measure.exchange import TokenSource
from optimc.measure.load.goodput import Goodput
from optimc.measure.load.interval import Interval, t_interval
from optimc.measure.load.resources import Resources
from optimc.measure.percentile import Distribution
from optimc.measure.speculation_result import SpeculationResult
from optimc.measure.workload import Workload

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
    failures are summed; "n" of a percentile is that of all runs. How near a bound the medians come is nothing that the
    runs know: whoever asked for it applies it to what comes back.
    """
    first = results[0]
    if len(results) == 1:
        return first
    intervals: dict[str, Interval] = {}
    changed: dict[str, Any] = {}
    for name in DISTRIBUTIONS:
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
        token_source=max((result.token_source for result in results), key=get_args(TokenSource).index),
        resources=_resources([result.resources for result in results if result.resources is not None]),
        speculation=_speculation([result.speculation for result in results if result.speculation is not None]),
        bound=None,
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


def _resources(runs: Sequence[Resources]) -> Resources | None:
    """Return the median share of the processor and the most memory of any run; unknown if it is of any run."""
    if not runs:
        return None
    shares = [run.cpu_share for run in runs if run.cpu_share is not None]
    peaks = [run.rss_peak_bytes for run in runs if run.rss_peak_bytes is not None]
    if len(shares) < len(runs) or len(peaks) < len(runs):
        return Resources(None, None, runs[0].scope)
    return Resources(median(shares), max(peaks), runs[0].scope)


def _speculation(runs: Sequence[SpeculationResult]) -> SpeculationResult | None:
    """Return the comparison of the run whose gain is the middle one: its figures belong together."""
    ordered = sorted(runs, key=lambda run: run.observed_speedup)
    return ordered[(len(ordered) - 1) // 2] if ordered else None


def _thirds(runs: Sequence[tuple[float, float, float]]) -> tuple[float, float, float] | None:
    if not runs:
        return None
    first, second, last = (median(column) for column in zip(*runs, strict=True))
    return first, second, last
