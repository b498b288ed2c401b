"""What a machine was measured to do: the constants that floors and predictions are made of.

Nothing in here comes from a user's plan. Best figures, which bounds divide by, and typical ones, which predictions add
up, are kept apart: on a virtual machine they differ by tens of percent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from optimc.measure.machine import Machine

RATES_FORMAT = 1
KernelKind = Literal[
    "int4", "int8", "int4_exact", "int8_exact", "float32", "bfloat16", "float16", "attention", "light"
]  # fmt: skip
"""Which kernels an operation runs. `exact`: integer weights met by activations in float32."""
BOUND_MARGIN = 1.05
"""Peaks count this much more in bounds: a virtual machine may be lent faster cores than those it was measured on."""


@dataclass(frozen=True, slots=True)
class KernelRate:
    """How fast products with one kind of weight run, weights lying in a working set of so many bytes."""

    kind: KernelKind
    group: int
    """Of integer codes, features that share a scale; 0 for floating point."""
    working_set_bytes: int
    points: tuple[tuple[int, float], ...]
    """(rows, seconds per stored byte of weight), rows ascending."""


@dataclass(frozen=True, slots=True)
class AttentionRate:
    """How fast one attention operation runs on a cache of one dtype that lies in memory, not in a cache."""

    s_per_byte: float
    """Per byte of keys and values read for a query that stands alone."""
    s_per_element: float
    """The same query's work: per query head, key and dimension."""
    s_per_head: float
    """Per sequence and key/value head."""
    prefill_s_per_element: float
    """Per query head, visible key and dimension where many queries of one sequence come together."""


@dataclass(frozen=True, slots=True)
class MachineRates:
    """One machine under one number of threads and one instruction set."""

    bandwidth: tuple[tuple[int, float], ...]
    """(working set in bytes, bytes read per second at best), ascending; an upper envelope (see `bandwidth_at`)."""
    int8_ops_per_s: float
    """Multiplications and additions of 8-bit integers, each counted, at best."""
    float_ops_per_s: float
    kernels: tuple[KernelRate, ...]
    attention: dict[str, AttentionRate]
    """By KV dtype."""
    exchange_s_per_byte: float
    """Per byte of activations an operation reads or writes, much of which another thread has written."""
    norm_s_per_element: float
    """Of a norm, all threads together, like what follows."""
    round_s_per_element: float
    """Of rounding activations to 8 bits."""
    round_s_per_group: float
    """The same, for every group with a scale of its own."""
    op_s: float
    """Of an operation that all threads wait for, with next to no work."""
    linear_op_s: float
    """What a product with a weight takes beyond its bytes: waiting, and the first lines of a weight come slowly."""
    step_s: float
    """What a step takes beyond the executor where it serves one client of `optimc bench`: engine and client."""
    sequence_s: float
    """The same, for every further client."""
    logits_row_s_per_element: float
    """Of sampling greedily from a row of logits, per entry of the vocabulary."""
    threads: int
    instruction_set: str
    machine: Machine
    measured_at: str
    """UTC, ISO 8601."""
    source: str
    """Where the figures come from, in words."""

    @property
    def margin(self) -> float:
        """How much more the peaks count in bounds."""
        return BOUND_MARGIN

    def bandwidth_at(self, working_set_bytes: float) -> float:
        """Return the most bytes per second that a working set of this size was ever read with.

        That of the largest measured one not above it, as a smaller set is read faster or as fast.
        """
        best = [rate for size, rate in self.bandwidth if size <= working_set_bytes]
        return best[-1] if best else self.bandwidth[0][1]

    def with_peaks_of(self, earlier: MachineRates) -> MachineRates:
        """Return these rates with the best peaks of both: what a machine once did it may do again."""
        return replace(
            self,
            bandwidth=envelope((*self.bandwidth, *earlier.bandwidth)),
            int8_ops_per_s=max(self.int8_ops_per_s, earlier.int8_ops_per_s),
            float_ops_per_s=max(self.float_ops_per_s, earlier.float_ops_per_s),
        )

    def to_json(self) -> dict[str, Any]:
        """Return all fields and the format's number."""
        return {
            "format": RATES_FORMAT,
            **asdict(self),
            "bandwidth": [list(point) for point in self.bandwidth],
            "kernels": [{**asdict(each), "points": [list(point) for point in each.points]} for each in self.kernels],
            "machine": self.machine.to_json(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> MachineRates:
        """Inverse of `to_json`. Raises ValueError, LookupError or TypeError on anything else."""
        if data["format"] != RATES_FORMAT:
            raise ValueError(f"format {data['format']}, this optimc reads {RATES_FORMAT}")
        taken = {field.name: data[field.name] for field in fields(cls)}
        taken["bandwidth"] = _pairs(data["bandwidth"])
        taken["kernels"] = tuple(KernelRate(**{**each, "points": _pairs(each["points"])}) for each in data["kernels"])
        taken["attention"] = {dtype: AttentionRate(**rate) for dtype, rate in data["attention"].items()}
        taken["machine"] = Machine.from_json(data["machine"])
        return cls(**taken)


def envelope(points: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Return the points ascending, one per size, each with the best rate seen at it or any larger one."""
    best = 0.0
    found: dict[int, float] = {}
    for size, rate in sorted(points, reverse=True):
        best = max(best, rate)
        found[size] = best
    return tuple(sorted(found.items()))


def _pairs(data: Sequence[Sequence[Any]]) -> tuple[tuple[int, float], ...]:
    return tuple((int(first), float(second)) for first, second in data)
