"""Two sides measured in turns: with, without, without, with. What drifts slowly meets both sides alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

from optimc.measure.attribution.block import Block
from optimc.measure.load.interval import Ratio, paired_ratio
from optimc.measure.workload import Workload

Side = Literal["with", "without"]
Metric = Literal["ttft_p50", "tpot_p50", "tokens_per_s"]
METRICS: tuple[Metric, ...] = get_args(Metric)
"""What is read of each block: medians in milliseconds, and a rate."""

ORDER: tuple[Side, ...] = ("with", "without", "without", "with")
"""Of one pair. A drift by the same factor from block to block cancels: 0 + 3 = 1 + 2."""

Measure = Callable[[Side, Workload], Block]
Load = Callable[[int, int], Block | None]
"""From the number of the pair and of the block in it to what an earlier run measured."""
Save = Callable[[int, int, Block], None]

Pair = Mapping[Side, tuple[Block, Block]]


@dataclass(frozen=True, slots=True)
class PairFigures:
    """All blocks of a comparison under one load."""

    pairs: tuple[Pair, ...]

    @property
    def failure(self) -> str | None:
        """Why the figures must not be trusted: requests failed, on either side."""
        for pair in self.pairs:
            for side, blocks in pair.items():
                for block in blocks:
                    if block.failures:
                        return f"{block.failures} of {block.requests} requests failed {side} it: {block.failure}"
        return None

    def ratios(self, metric: Metric) -> list[float] | None:
        """Return with / without for each pair, both as geometric means of their two blocks; None if a block has no
        such figure, or none above 0."""
        sides = self._sides(metric)
        return None if sides is None else [a / b for a, b in zip(*sides, strict=True)]

    def ratio(self, metric: Metric) -> Ratio | None:
        """Return the same as one figure with its interval."""
        sides = self._sides(metric)
        return None if sides is None else paired_ratio(*sides)

    def values(self, side: Side, metric: Metric) -> list[float] | None:
        """Return a metric of each block of a side, in the order of measuring; None if a block has no such figure."""
        read = self._reader(metric)
        found = [read(block) for pair in self.pairs for block in pair[side]]
        known = [value for value in found if value is not None]
        return known if known and len(known) == len(found) else None

    def _sides(self, metric: Metric) -> tuple[list[float], list[float]] | None:
        one, other = self.values("with", metric), self.values("without", metric)
        if one is None or other is None or min(*one, *other) <= 0:
            return None
        return _means(one), _means(other)

    def _reader(self, metric: Metric) -> Callable[[Block], float | None]:
        if metric == "ttft_p50":
            return lambda block: block.ttft_p50_ms
        if metric == "tpot_p50":
            return lambda block: block.tpot_p50_ms
        blocks = [block for pair in self.pairs for side in pair.values() for block in side]
        # One kind of throughput for all blocks, or the quotient would compare two definitions.
        if all(block.tokens_per_s is not None for block in blocks):
            return lambda block: block.tokens_per_s
        return lambda block: block.whole_run_tokens_per_s


def measure_pair(
    workload: Workload,
    pairs: int,
    measure: Measure,
    *,
    load: Load = lambda _pair, _block: None,
    save: Save = lambda _pair, _number, _block: None,
    on_block: Callable[[int, int], None] = lambda _done, _total: None,
) -> PairFigures:
    """Measure `pairs` pairs, block by block, never two at once. What `load` has is not measured again.

    Both sides of a pair get the same prompts: those of the workload's seed plus the pair's number.
    """
    found: list[Pair] = []
    total = pairs * len(ORDER)
    for number in range(pairs):
        seeded = replace(workload, seed=workload.seed + number)
        sides: dict[Side, list[Block]] = {"with": [], "without": []}
        for place, side in enumerate(ORDER):
            block = load(number, place)
            if block is None:
                block = measure(side, seeded)
                save(number, place, block)
            sides[side].append(block)
            on_block(number * len(ORDER) + place + 1, total)
        found.append({side: (blocks[0], blocks[1]) for side, blocks in sides.items()})
    return PairFigures(tuple(found))


def _means(values: list[float]) -> list[float]:
    """Geometric means of successive twos: the blocks of one pair."""
    return [math.sqrt(a * b) for a, b in zip(values[::2], values[1::2], strict=True)]
