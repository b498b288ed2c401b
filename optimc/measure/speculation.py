"""What guessing ahead gains: the same engine with and without it, in turns, and why."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Protocol

from optimc.measure.bench import summarize
from optimc.measure.bench_result import BenchResult
from optimc.measure.driver import Clock
from optimc.measure.engine_driver import EngineDriver
from optimc.measure.exchange import Exchange
from optimc.measure.load.closed_loop import run_closed_loop
from optimc.measure.load.dataset import Dataset, LinesDataset
from optimc.measure.load.load_run import LoadRun
from optimc.measure.served_engine import ServedEngine
from optimc.measure.speculation_result import SpeculationResult
from optimc.measure.workload import Workload
from optimc.progress import Progress, no_progress
from optimc_runtime.speculate.controller import choose
from optimc_runtime.speculate.cost_model import CostModel
from optimc_runtime.stats import EngineStats, ProposerStats, SpeculationStats

TURNS = (True, False, False, True)
"""Blocks with (True) and without speculation: what drifts slowly hits both alike."""
LARGEST_BATCH = 256
RANDOM_PROMPTS = "prompts are random ids: what is guessed of such answers says nothing about real ones; give --dataset"


class SpeculatingEngine(ServedEngine, Protocol):
    """An engine whose guesses can be looked at."""

    @property
    def step_costs(self) -> CostModel | None:
        """What steps are believed to take; None without speculation."""
        ...

    def stats(self) -> EngineStats:
        """Return a snapshot."""
        ...


@dataclass(slots=True)
class _Side:
    """What was measured with, or without."""

    results: list[BenchResult] = field(default_factory=list)
    tokens: int = 0
    decode_s: float = 0.0

    def add(self, result: BenchResult, exchanges: Sequence[Exchange]) -> None:
        """Take in a block's good requests: their tokens after the first, and how long those took."""
        self.results.append(result)
        for exchange in exchanges:
            if exchange.succeeded and exchange.e2e_s is not None and exchange.ttft_s is not None:
                self.tokens += exchange.output_tokens - 1
                self.decode_s += exchange.e2e_s - exchange.ttft_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens a client gets per second once its answer has begun."""
        return self.tokens / self.decode_s if self.decode_s > 0 else 0.0


def bench_speculation(
    engine: SpeculatingEngine,
    config: Workload,
    progress: Progress = no_progress,
    *,
    prompts: Sequence[Sequence[int]] | None = None,
    dataset: Dataset | None = None,
) -> BenchResult:
    """Measure an engine that speculates, block by block with and without. The result is that of the last block with, or
    of one in which too many requests failed, and holds the comparison. Raises MeasureError as `run_bench` does.

    `dataset` says what is sent, or `prompts`, token ids, each in turn; without either, random prompts, which the result
    warns of.
    """
    clock = time.perf_counter
    if dataset is None and prompts is not None:
        dataset = LinesDataset([(list(ids), config.output_tokens, None) for ids in prompts], is_scheduled=False)
    with_, without = _Side(), _Side()
    total: SpeculationStats | None = None
    for turn, speculates in enumerate(TURNS):
        before = engine.stats().speculation
        driver = EngineDriver(engine, clock, speculation=None if speculates else "off")

        def on_progress(done: int, of: int, label: str, turn: int = turn) -> None:
            progress(turn * of + done, len(TURNS) * of, label)

        run = asyncio.run(_run_block(driver, config, dataset, clock, on_progress))
        (with_ if speculates else without).add(summarize(run, config, driver.description, driver.notes()), run.measured)
        after = engine.stats().speculation
        assert before is not None, "the engine speculates"
        assert after is not None
        if speculates:
            block = _combined(after, before, -1)
            total = block if total is None else _combined(block, total, 1)
    assert total is not None
    comparison = summarize_speculation(
        total,
        engine.step_costs or CostModel(),
        batch=config.concurrency,
        plain_tokens_per_s=without.tokens_per_s * config.concurrency,
        speculative_tokens_per_s=with_.tokens_per_s * config.concurrency,
    )
    shown = next((result for result in (*with_.results, *without.results) if not result.ok), with_.results[-1])
    warnings = shown.warnings if dataset is not None else (*shown.warnings, RANDOM_PROMPTS)
    return replace(shown, speculation=comparison, warnings=warnings)


async def _run_block(
    driver: EngineDriver, config: Workload, dataset: Dataset | None, clock: Clock, progress: Progress
) -> LoadRun:
    label = f"bench, concurrency {config.concurrency}"
    progress(0, config.num_requests, label)
    ready = await driver.prepare(config, secrets.token_hex(8), dataset)
    return await run_closed_loop(driver, ready, config, clock, lambda done: progress(done, config.num_requests, label))


def summarize_speculation(
    stats: SpeculationStats,
    cost: CostModel,
    *,
    batch: int,
    plain_tokens_per_s: float,
    speculative_tokens_per_s: float,
) -> SpeculationResult:
    """Return the comparison, with what the cost model makes of what was accepted."""
    steps = stats.sequence_steps / batch
    drafted = sum(each.drafted for each in stats.proposers.values())
    draft_s = stats.draft_s / steps if steps else 0.0
    rates = [
        accepted / tried if tried else 0.0
        for tried, accepted in zip(stats.position_drafted, stats.position_accepted, strict=True)
    ]
    rows = batch + drafted / steps if steps else float(batch)
    ratio = (_seconds(cost, batch, rows) + draft_s) / cost.seconds(batch, batch)
    return SpeculationResult(
        mode=stats.mode,
        proposers=dict(stats.proposers),
        acceptance_by_position=tuple(rates),
        tokens_per_step=stats.tokens_per_step,
        draft_s_per_step=draft_s,
        costs=cost.around(batch),
        predicted_speedup=stats.tokens_per_step / ratio,
        break_even_batch=break_even_batch(rates, cost, draft_s / batch),
        plain_tokens_per_s=plain_tokens_per_s,
        speculative_tokens_per_s=speculative_tokens_per_s,
    )


def break_even_batch(rates: Sequence[float], cost: CostModel, draft_s: float) -> int | None:
    """Return the smallest number of sequences with which verifying guesses of these acceptance rates by position does
    not pay; None if it pays up to LARGEST_BATCH. `draft_s`: of one sequence and step."""
    estimates: list[float] = []
    for rate in rates:
        estimates.append(rate * (estimates[-1] if estimates else 1.0))
    for batch in range(1, LARGEST_BATCH + 1):
        merged = sorted(estimates * batch, reverse=True)
        plain = batch / cost.seconds(batch, batch)
        n = choose(merged, batch, 0, cost, draft_s * batch)
        if (batch + sum(merged[:n])) / (cost.seconds(batch, batch + n) + draft_s * batch) <= plain:
            return batch
    return None


def _combined(one: SpeculationStats, other: SpeculationStats, sign: int) -> SpeculationStats:
    """Return one plus `sign` times the other."""

    def add(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
        return tuple([a + sign * b for a, b in zip_longest(left, right, fillvalue=0)])

    return replace(
        one,
        proposers={
            name: ProposerStats(
                figures.drafted + sign * other.proposers[name].drafted,
                figures.accepted + sign * other.proposers[name].accepted,
                figures.trees + sign * other.proposers[name].trees,
            )
            for name, figures in one.proposers.items()
        },
        position_drafted=add(one.position_drafted, other.position_drafted),
        position_accepted=add(one.position_accepted, other.position_accepted),
        sequence_steps=one.sequence_steps + sign * other.sequence_steps,
        emitted=one.emitted + sign * other.emitted,
        draft_s=one.draft_s + sign * other.draft_s,
    )


def _seconds(cost: CostModel, batch: int, rows: float) -> float:
    """Return what steps of so many rows on average take."""
    low = int(rows)
    low_s, high_s = cost.seconds(batch, low), cost.seconds(batch, low + 1)
    return low_s + (high_s - low_s) * (rows - low)
