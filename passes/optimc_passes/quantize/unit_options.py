"""Sets of linear layers that are given one number format together, and what each format costs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from optimc_passes.choices import Scheme
from optimc_passes.quantize.linears import LinearWeight

_SCALE_BYTES, _ZERO_BYTES = 2, 1
_ENDS = ("o_proj", "down_proj")
"""Linear layers that read something of their own; all others of one half of a decoder layer read one value."""


@dataclass(frozen=True)
class Unit:
    """Linear layers that read one value."""

    name: str
    """Module name of the half of the decoder layer and of what is in it: "model.layers.3.mlp.gate_proj+up_proj"."""
    linears: tuple[LinearWeight, ...]

    @property
    def elements(self) -> int:
        """Weights of all layers."""
        return sum(math.prod(linear.shape) for linear in self.linears)

    def group_sizes(self, asked: Iterable[int]) -> tuple[int, ...]:
        """Return those of the group sizes that divide the columns; -1, the whole row, always does."""
        columns = self.linears[0].shape[1]
        return tuple(dict.fromkeys(size for size in asked if size == -1 or columns % size == 0))


@dataclass(frozen=True)
class Priced:
    """A format for a unit, and what it takes."""

    scheme: Scheme
    payload_bits: int
    """Of the codes alone; of a layer that stays dense, of its weights as they are stored."""
    nbytes: int
    """As stored: 2 and 3 bits take 4, with float16 scales and zero points of a byte."""


def units_of(chosen: Sequence[LinearWeight]) -> tuple[Unit, ...]:
    """Group layers by what they read, in the model's order. A head is a unit of its own."""
    groups: dict[tuple[str, str], list[LinearWeight]] = {}
    for linear in chosen:
        half, _, last = linear.layer.rpartition(".")
        own = last if linear.is_head or last in _ENDS else ""
        groups.setdefault((half, own), []).append(linear)
    units = []
    for (half, _), linears in groups.items():
        parts = "+".join(linear.layer.rpartition(".")[2] for linear in linears)
        units.append(Unit(f"{half}.{parts}" if half else parts, tuple(linears)))
    return tuple(units)


def priced(
    unit: Unit, *, bits: Sequence[int], group_sizes: Sequence[int], symmetric: bool, dense_bytes: int | None
) -> tuple[Priced, ...]:
    """Return every format a unit may have; `dense_bytes` is what it takes as it is, None if it must not stay so."""
    found = []
    for size in unit.group_sizes(group_sizes):
        for width in bits:
            scheme = Scheme(width, size, symmetric)
            nbytes = sum(_stored_bytes(linear, width, size, symmetric) for linear in unit.linears)
            found.append(Priced(scheme, width * unit.elements, nbytes))
    if dense_bytes is not None:
        found.append(Priced(Scheme(None, -1, symmetric), 8 * dense_bytes, dense_bytes))
    return tuple(found)


def _stored_bytes(linear: LinearWeight, bits: int, size: int, symmetric: bool) -> int:
    rows, columns = linear.shape
    groups = rows * (1 if size == -1 else columns // size)
    width = 4 if bits <= 4 else 8
    return rows * columns * width // 8 + groups * (_SCALE_BYTES + (0 if symmetric else _ZERO_BYTES))
