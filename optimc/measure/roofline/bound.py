"""Floors: times that no run of a plan on a machine beats.

A step takes at least as long as reading what it must from memory takes at the best bandwidth ever seen for so much, and
at least as long as its operations take at the best rate ever seen. Both overlap in the best case, so the floor is the
larger. Whatever a step may find in a cache is left out: activations, tables but for one row, and the keys and values it
has written itself; a weight that two operations share is read once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from optimc.measure.roofline.work import OpWork, PlanWork, StepShape, distinct_bytes, step_work

Limiter = Literal["memory", "compute"]


class Peaks(Protocol):
    """What bounds divide by: a machine's measured rates, or a GPU's datasheet."""

    @property
    def int8_ops_per_s(self) -> float:
        """Multiplications and additions of 8-bit integers, each counted."""
        ...

    @property
    def float_ops_per_s(self) -> float:
        """The same of floating point."""
        ...

    @property
    def margin(self) -> float:
        """How much more the peaks count."""
        ...

    def bandwidth_at(self, working_set_bytes: float) -> float:
        """Return the most bytes read per second from a working set of this size."""
        ...


@dataclass(frozen=True, slots=True)
class Floor:
    """Least milliseconds at one batch and context, and what they come from."""

    tpot_ms: float
    ttft_ms: float | None
    """Of one prompt as long as the context; None for larger batches."""
    limiter: Limiter
    """Of TPOT."""
    weight_bytes: int
    """Of one decode step, like what follows."""
    kv_bytes: int
    ops: int


@dataclass(frozen=True, slots=True)
class StepFloor:
    """Least seconds of one step."""

    memory_s: float
    compute_s: float
    weight_bytes: int
    kv_bytes: int
    ops: int

    @property
    def seconds(self) -> float:
        """The floor."""
        return max(self.memory_s, self.compute_s)

    @property
    def limiter(self) -> Limiter:
        """What takes longer."""
        return "memory" if self.memory_s >= self.compute_s else "compute"


def step_floor(ops: Sequence[OpWork], rates: Peaks) -> StepFloor:
    """Return the floor of a step of these operations."""
    weights = distinct_bytes(ops)
    table = sum(op.table_bytes // max(1, op.rows) for op in ops)
    cache = sum(op.kv_context_bytes for op in ops)
    int8_ops, float_ops = sum(op.int8_ops for op in ops), sum(op.float_ops for op in ops)
    read = weights + table + cache
    memory_s = read / (rates.margin * rates.bandwidth_at(read))
    compute_s = (int8_ops / rates.int8_ops_per_s + float_ops / rates.float_ops_per_s) / rates.margin
    return StepFloor(memory_s, compute_s, weights + table, cache, int8_ops + float_ops)


def decode_floor(work: PlanWork, rates: Peaks, batch: int, context: int) -> StepFloor:
    """Return the floor of the step that gives each of `batch` sequences, each `context` long, one more token."""
    return step_floor(step_work(work, StepShape.decode(batch, context)), rates)


def prefill_floor_s(work: PlanWork, rates: Peaks, tokens: int, most: int) -> float:
    """Return the least seconds from a prompt of `tokens` to its first token, `most` tokens in a step."""
    return total_s(step_floor(step_work(work, shape), rates) for shape in StepShape.prefill(tokens, most))


def total_s(floors: Iterable[StepFloor]) -> float:
    """Return the sum of steps one after another."""
    return sum(floor.seconds for floor in floors)


def cell_floor(work: PlanWork, rates: Peaks, batch: int, context: int) -> Floor:
    """Return the floors at one batch and context."""
    step = decode_floor(work, rates, batch, context)
    prefill_s = prefill_floor_s(work, rates, context, work.max_step_tokens) if batch == 1 else None
    return Floor(
        tpot_ms=step.seconds * 1e3,
        ttft_ms=None if prefill_s is None else prefill_s * 1e3,
        limiter=step.limiter,
        weight_bytes=step.weight_bytes,
        kv_bytes=step.kv_bytes,
        ops=step.ops,
    )


def compute_bound_batch(work: PlanWork, rates: Peaks, context: int, most: int) -> int | None:
    """Return the smallest batch up to `most` whose decode step is limited by compute; None if none is.

    Memory's time grows with the batch by its caches alone, compute's by everything: with one crossing at most it is
    found by halving.
    """
    if decode_floor(work, rates, most, context).limiter == "memory":
        return None
    below, found = 0, most
    while found - below > 1:
        middle = (below + found) // 2
        if decode_floor(work, rates, middle, context).limiter == "compute":
            found = middle
        else:
            below = middle
    return found
