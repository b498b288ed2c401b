"""`optimc bench`: latency and throughput under a closed loop, with what makes the figures trustworthy beside them."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Sequence

from optimc.errors import MeasureError
from optimc.measure.bench_result import BenchResult, TokenRange
from optimc.measure.closed_loop import LoadRun, run_closed_loop
from optimc.measure.driver import Clock, Driver
from optimc.measure.engine_driver import EngineDriver
from optimc.measure.exchange import Exchange, TokenSource
from optimc.measure.http_driver import HttpDriver
from optimc.measure.machine import read_machine
from optimc.measure.percentile import Distribution
from optimc.measure.served_engine import ServedEngine
from optimc.measure.throughput import measured_wall_s, steady_tokens_per_s, whole_run_tokens_per_s
from optimc.measure.workload import Workload
from optimc.progress import Progress, no_progress

MAX_HIT_RATE = 0.03
"""Share of prompt tokens from the prefix cache above which TTFT no longer measures prefill."""


def run_bench(
    target: ServedEngine | str,
    config: Workload,
    progress: Progress = no_progress,
    *,
    model: str | None = None,
    chat: bool = False,
    api_key: str | None = None,
    prompts: Sequence[Sequence[int]] | None = None,
) -> BenchResult:
    """Measure a started engine, or the OpenAI-compatible server at a URL (then `model`, `chat` and `api_key` apply).
    `prompts` are token ids for an engine, sent in turn instead of random ones.

    Raises MeasureError when the target cannot serve such requests at all. Requests that fail are counted, not raised.
    """
    clock = time.perf_counter
    driver: Driver
    if isinstance(target, str):
        driver = HttpDriver(target, clock, model=model, chat=chat, api_key=api_key)
    else:
        driver = EngineDriver(target, clock, prompts=prompts)
    return asyncio.run(bench_driver(driver, config, clock, secrets.token_hex(8), progress))


async def bench_driver(
    driver: Driver, config: Workload, clock: Clock, run_id: str, progress: Progress = no_progress
) -> BenchResult:
    """Run the load through a driver and sum up. `run_id` makes the prompts unlike those of any other run."""
    label = f"bench, concurrency {config.concurrency}"
    progress(0, config.num_requests, label)
    try:
        prompts = await driver.prepare(config, run_id)
        run = await run_closed_loop(
            driver, prompts, config, clock, lambda done: progress(done, config.num_requests, label)
        )
        return summarize(run, config, driver.description, driver.notes())
    finally:
        await driver.close()


def summarize(run: LoadRun, config: Workload, description: str, notes: Sequence[str] = ()) -> BenchResult:
    """Turn exchanges into figures. Raises MeasureError when every request failed."""
    good = [exchange for exchange in run.measured if exchange.succeeded]
    failures = Counter(exchange.failure for exchange in run.measured if exchange.failure is not None)
    if not good:
        reason, count = failures.most_common(1)[0]
        raise MeasureError(f"{description}: all {len(run.measured)} requests failed; {count} with: {reason}")
    wall_s = measured_wall_s(run)
    known = [e for e in good if e.prompt_tokens is not None and e.cached_tokens is not None]
    cached, prompted = sum(e.cached_tokens or 0 for e in known), sum(e.prompt_tokens or 0 for e in known)
    hit_rate = cached / prompted if prompted else None
    prompt_range = TokenRange.of([e.prompt_tokens for e in good if e.prompt_tokens is not None])
    output_range = TokenRange.of([e.output_tokens for e in good])
    source = _weakest_source(good)
    warnings = [*notes, *_warnings(config, hit_rate, prompt_range, output_range, source)]
    return BenchResult(
        description=description,
        config=config,
        machine=read_machine(),
        requests=len(run.measured),
        failures={str(reason): count for reason, count in failures.most_common()},
        ttft_ms=_milliseconds([e.ttft_s for e in good]),
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
    )


def _milliseconds(values: Sequence[float | None]) -> Distribution:
    return Distribution.of([value * 1e3 for value in values if value is not None])


def _prefill_tokens_per_s(good: Sequence[Exchange], config: Workload) -> float | None:
    """With several clients TTFT holds the others' work too, so the quotient would mean nothing."""
    if config.concurrency > 1:
        return None
    pairs = [(e.prefill_tokens, e.ttft_s) for e in good if e.prompt_tokens is not None and e.ttft_s is not None]
    seconds = sum(ttft_s for _, ttft_s in pairs)
    return sum(tokens for tokens, _ in pairs) / seconds if seconds > 0 else None


def _weakest_source(good: Sequence[Exchange]) -> TokenSource:
    order: tuple[TokenSource, ...] = ("ids", "usage", "estimate")
    return max((exchange.source for exchange in good), key=order.index)


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
        found.append(f"{hit_rate:.1%} of prompt tokens came from the prefix cache ({cause}): TTFT is not prefill time")
    if config.same_prompts and hit_rate is None:
        found.append(
            "all prompts are the same: a prefix cache makes TTFT meaningless, and the server shows no hit rate"
        )
    if source == "estimate":
        found.append("the server sends no usage: tokens are estimated as chunks")
    if (
        config.prompts is None
        and prompt is not None
        and (prompt.low, prompt.high) != (config.prompt_tokens, config.prompt_tokens)
    ):
        found.append(f"asked for {config.prompt_tokens} prompt tokens, the server counted {prompt}")
    if output is not None and (output.low, output.high) != (config.output_tokens, config.output_tokens):
        found.append(f"asked for {config.output_tokens} output tokens, got {output}")
    return found
