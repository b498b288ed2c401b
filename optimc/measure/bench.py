"""`optimc bench`: latency and throughput under load, with what makes the figures trustworthy beside them."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from optimc.errors import MeasureError
from optimc.measure.bench_result import BenchResult, TokenRange
from optimc.measure.driver import Clock, Driver
from optimc.measure.engine_driver import EngineDriver
from optimc.measure.exchange import Exchange, TokenSource
from optimc.measure.http_driver import HttpDriver
from optimc.measure.load.closed_loop import run_closed_loop
from optimc.measure.load.dataset import Dataset, sized_by
from optimc.measure.load.goodput import Goodput
from optimc.measure.load.interval import Interval, percentile_interval
from optimc.measure.load.load_run import LoadRun
from optimc.measure.load.open_loop import run_open_loop
from optimc.measure.load.resources import ResourceMeter, Resources
from optimc.measure.machine import read_machine
from optimc.measure.percentile import Distribution, percentile
from optimc.measure.served_engine import ServedEngine
from optimc.measure.throughput import measured_wall_s, steady_tokens_per_s, whole_run_tokens_per_s
from optimc.measure.workload import Workload
from optimc.progress import Progress, no_progress

if TYPE_CHECKING:
    from optimc.measure.roofline.row_bound import RowBound

MAX_HIT_RATE = 0.03
"""Share of prompt tokens from the prefix cache above which TTFT no longer measures prefill."""

MAX_LAG_S = 0.010
MAX_LAG_SHARE = 0.05
"""Lag of the load generator, p99, absolute and as a share of the TTFT, above which it is no longer negligible."""

BoundOf = Callable[[BenchResult], "RowBound | None"]
"""Says how far the machine would let a result go."""


def run_bench(
    target: ServedEngine | str,
    workload: Workload,
    progress: Progress = no_progress,
    *,
    model: str | None = None,
    chat: bool = False,
    api_key: str | None = None,
    dataset: Dataset | None = None,
    server_pid: int | None = None,
    bound: BoundOf | None = None,
) -> BenchResult:
    """Measure a started engine, or the OpenAI-compatible server at a URL (then `model`, `chat` and `api_key` apply).

    `dataset` None: random prompts, or conversations of them. `server_pid`: the process whose processor time and memory
    are watched; without, this one for an engine, and none for a URL. `bound` adds what the machine allows.

    Raises MeasureError when the target cannot serve such requests at all. Requests that fail are counted, not raised.
    """
    clock = time.perf_counter
    driver: Driver
    if isinstance(target, str):
        driver = HttpDriver(target, clock, model=model, chat=chat, api_key=api_key)
        meter = ResourceMeter.of_server(server_pid)
    else:
        driver = EngineDriver(target, clock)
        meter = ResourceMeter.of_server(server_pid) if server_pid is not None else ResourceMeter.of_this_process()
    run_id = secrets.token_hex(8)
    result = asyncio.run(bench_driver(driver, workload, clock, run_id, progress, dataset=dataset, meter=meter))
    return result if bound is None else replace(result, bound=bound(result))


async def bench_driver(
    driver: Driver,
    config: Workload,
    clock: Clock,
    run_id: str,
    progress: Progress = no_progress,
    *,
    dataset: Dataset | None = None,
    meter: ResourceMeter | None = None,
) -> BenchResult:
    """Run the load through a driver and sum up. `run_id` makes the prompts unlike those of any other run."""
    config = sized_by(config, dataset)
    label = _label(config)
    progress(0, config.num_requests, label)
    run_loop = run_open_loop if config.is_open else run_closed_loop
    try:
        ready = await driver.prepare(config, run_id, dataset)
        if meter is not None:
            meter.start()
        try:
            run = await run_loop(driver, ready, config, clock, lambda done: progress(done, config.num_requests, label))
        finally:
            resources = None if meter is None else meter.stop()
        return summarize(run, config, driver.description, driver.notes(), resources)
    finally:
        await driver.close()


def _label(config: Workload) -> str:
    if config.arrival == "closed":
        return f"bench, concurrency {config.concurrency}"
    return f"bench, {config.rate_text()}"


def summarize(
    run: LoadRun,
    config: Workload,
    description: str,
    notes: Sequence[str] = (),
    resources: Resources | None = None,
) -> BenchResult:
    """Turn exchanges into figures. Raises MeasureError when every request of a closed loop failed; in an open one that
    is a finding, of a rate that is too high."""
    good = [exchange for exchange in run.measured if exchange.succeeded]
    failures = Counter(exchange.failure for exchange in run.measured if exchange.failure is not None)
    if not good and (not config.is_open or not run.measured):
        reasons = failures + Counter({"not sent, as an earlier turn failed": run.not_sent})
        reason, count = reasons.most_common(1)[0]
        raise MeasureError(f"{description}: all {reasons.total()} requests failed; {count} with: {reason}")
    wall_s = measured_wall_s(run)
    known = [e for e in good if e.prompt_tokens is not None and e.cached_tokens is not None]
    cached, prompted = sum(e.cached_tokens or 0 for e in known), sum(e.prompt_tokens or 0 for e in known)
    hit_rate = cached / prompted if prompted else None
    prompt_range = TokenRange.of([e.prompt_tokens for e in good if e.prompt_tokens is not None])
    output_range = TokenRange.of([e.output_tokens for e in good])
    source = _weakest_source(good)
    lags = [e.lag_s for e in run.measured if e.lag_s is not None]
    ttft_ms = _milliseconds([e.ttft_s for e in good])
    warnings = [*notes, *_warnings(config, hit_rate, prompt_range, output_range, source), *_lateness(lags, ttft_ms)]
    if run.not_sent:
        warnings.append(f"{run.not_sent} later turns were not sent, as an earlier one failed; they count as neither")
    return BenchResult(
        description=description,
        config=config,
        machine=read_machine(),
        requests=len(run.measured),
        failures={str(reason): count for reason, count in failures.most_common()},
        ttft_ms=ttft_ms,
        tpot_ms=_milliseconds([e.tpot_s for e in good]),
        itl_ms=_milliseconds([gap for e in good for gap in e.itl_s]),
        e2e_ms=_milliseconds([e.e2e_s for e in good]),
        queue_ms=_milliseconds([e.queue_s for e in good]),
        cold_ttft_ms=None if run.cold is None or run.cold.ttft_s is None else run.cold.ttft_s * 1e3,
        output_tokens_per_s=steady_tokens_per_s(run),
        output_tokens_per_s_whole_run=whole_run_tokens_per_s(run),
        requests_per_s=len(good) / wall_s if wall_s > 0 else 0.0,
        prefill_tokens_per_s=_prefill_tokens_per_s(good, config),
        prefix_hit_rate=hit_rate,
        prompt_tokens=prompt_range,
        output_tokens=output_range,
        token_source=source,
        wall_s=wall_s,
        warnings=tuple(warnings),
        goodput=None if config.slo is None else Goodput.of_run(config.slo, run.measured, wall_s),
        intervals=_intervals(good),
        resources=resources,
        in_flight_end=0 if run.window_end_s is None else run.in_flight(run.window_end_s),
        in_flight_thirds=run.in_flight_thirds(),
        lag_ms=_milliseconds(lags),
        not_sent=run.not_sent,
    )


def _intervals(good: Sequence[Exchange]) -> dict[str, Interval]:
    """Return the intervals of each latency's percentiles within this run, as far as it has enough requests."""
    in_order = sorted(good, key=lambda exchange: exchange.sent_s)
    found = {}
    for name in ("ttft", "tpot", "e2e"):
        seconds = [getattr(exchange, f"{name}_s") for exchange in in_order]
        milliseconds = [value * 1e3 for value in seconds if value is not None]
        for q in (50, 90, 99):
            interval = percentile_interval(milliseconds, q)
            if interval is not None:
                found[f"{name}_ms.p{q}"] = interval
    return found


def _lateness(lags: Sequence[float], ttft_ms: Distribution) -> list[str]:
    """Say when requests were not sent when they were due."""
    if not lags:
        return []
    late_s = percentile(lags, 99)
    ttft_s = None if ttft_ms.p50 is None else ttft_ms.p50 / 1e3
    if late_s <= MAX_LAG_S and (ttft_s is None or late_s <= MAX_LAG_SHARE * ttft_s):
        return []
    return [
        f"the load generator itself was late: requests were sent up to {late_s * 1e3:.1f} ms (p99) after they were "
        "due, which is inside TTFT and E2E; give it a core of its own, or ask for a lower rate"
    ]


def _milliseconds(values: Sequence[float | None]) -> Distribution:
    return Distribution.of([value * 1e3 for value in values if value is not None])


def _prefill_tokens_per_s(good: Sequence[Exchange], config: Workload) -> float | None:
    """With several clients TTFT holds the others' work too, so the quotient would mean nothing."""
    if config.concurrency > 1 or config.is_open:
        return None
    pairs = [(e.prefill_tokens, e.ttft_s) for e in good if e.prompt_tokens is not None and e.ttft_s is not None]
    seconds = sum(ttft_s for _, ttft_s in pairs)
    return sum(tokens for tokens, _ in pairs) / seconds if seconds > 0 else None


def _weakest_source(good: Sequence[Exchange]) -> TokenSource:
    order: tuple[TokenSource, ...] = ("ids", "usage", "estimate")
    return max((exchange.source for exchange in good), key=order.index, default="ids")


def _warnings(
    config: Workload,
    hit_rate: float | None,
    prompt: TokenRange | None,
    output: TokenRange | None,
    source: TokenSource,
) -> list[str]:
    found = []
    if hit_rate is not None and hit_rate > MAX_HIT_RATE:
        cause = "as asked for" if config.same_prompts or config.shared_prefix_tokens else "not asked for"
        if config.prompts is not None:
            cause = "prompts begin alike"
        if config.dataset == "turns":
            cause = "later turns repeat what went before"
        found.append(f"{hit_rate:.1%} of prompt tokens came from the prefix cache ({cause}): TTFT is not prefill time")
    if config.same_prompts and hit_rate is None:
        found.append(
            "all prompts are the same: a prefix cache makes TTFT meaningless, and the server shows no hit rate"
        )
    if source == "estimate":
        found.append("the server sends no usage: tokens are estimated as chunks")
    # A file's prompts are as long as they are, and conversations grow.
    has_one_length = config.prompts is None and config.dataset == "random"
    if has_one_length and prompt is not None and not _within(prompt, config.prompt_tokens, config.prompt_spread):
        found.append(f"asked for {config.prompt_tokens} prompt tokens, the server counted {prompt}")
    has_own_lengths = config.dataset in ("file", "trace")
    if output is not None and not has_own_lengths and not _within(output, config.output_tokens, config.output_spread):
        found.append(f"asked for {config.output_tokens} output tokens, got {output}")
    return found


def _within(tokens: TokenRange, mean: int, spread: float) -> bool:
    """Whether all counts are as asked for."""
    return max(1, round(mean * (1 - spread))) <= tokens.low and tokens.high <= round(mean * (1 + spread))
