"""What the values of a graph become while it is translated.

The graph's activations have one axis of rows (T tokens, or R rows that need logits) between axes of size 1 and the
axes that make up a row: [1, T, H, D] has one axis before the rows and a row of H * D elements. In the program a row is
columns of a buffer, so reshaping changes nothing but the axes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from optimc.plan.cpu_program import RowsKind, View
from optimc_passes.emit.cpu.axes import Axes
from optimc_passes.emit.cpu.constants import Constant
from optimc_passes.emit.cpu.no_kernel import NoKernelError


@dataclass(frozen=True, eq=False)
class Frequencies:
    """Angles position * frequencies, float32 [F] per row."""

    values: np.ndarray


@dataclass(frozen=True)
class Wave:
    """scale * cos or sin of angles."""

    function: str
    frequencies: Frequencies
    scale: float


@dataclass(frozen=True)
class Rotated:
    """Heads that attention rotates when it reads them."""

    view: View
    rotation: View
    """Buffer of cosines and sines."""
    interleaved: bool
    head_dim: int


@dataclass(frozen=True)
class Rounded:
    """Columns of a buffer rounded to 8 bits with one static scale, by the operation that multiplies them."""

    view: View
    scale: float
    is_codes: bool = False
    """Whether it is the int8 numbers, not yet times the scale."""


@dataclass(frozen=True)
class TokenIds:
    """input_ids."""


@dataclass(frozen=True, eq=False)
class TableRows:
    """Rows of a table by token id that are looked up where they are dequantized, all parts of a row together."""

    table: Constant
    """Scales [V, g], or unsigned codes [V, C] or zero points [V, g]."""
    bits: int = 0
    """4 or 8: how codes are stored."""


@dataclass(frozen=True)
class Positions:
    """position_ids."""


Content = View | Rotated | Rounded | Frequencies | Wave | TokenIds | TableRows | Positions


@dataclass(frozen=True)
class Rows:
    """An array with an axis of rows."""

    content: Content
    axes: Axes
    rows: RowsKind = "tokens"

    def shaped(self, axes: Axes) -> Rows:
        """Return the same rows under other axes."""
        return replace(self, axes=axes)

    def __str__(self) -> str:
        return self.axes.show("T" if self.rows == "tokens" else "R")


@dataclass(frozen=True)
class LogitsRows:
    """logits_rows: the rows a gather picks."""


@dataclass(frozen=True, eq=False)
class QuantizedMatrix:
    """A DequantizeLinear over constants, [C, N] until it is transposed."""

    name: str
    codes: Constant
    """Unsigned [C, N]."""
    scales: Constant
    zeros: Constant | None
    bits: int
    group: int
    order: Constant | None = None
    """Rows are taken in this order."""
    swapped: bool = False
    """Whether the axes are exchanged after that."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its axes as the graph has them."""
        return self.codes.shape[::-1] if self.swapped else self.codes.shape


Value = Rows | Constant | QuantizedMatrix | LogitsRows


def show(value: Value | None) -> str:
    """Return the shape of a value for a message."""
    match value:
        case Rows():
            return str(value)
        case Constant() | QuantizedMatrix():
            return f"[{', '.join(map(str, value.shape))}]"
        case LogitsRows():
            return "[R]"
    return "absent"


def view_of(value: Value | None) -> View:
    """Return the columns an activation lies in. Raises NoKernelError if it lies nowhere."""
    match value:
        case Rows(View() as view):
            return view
        case Rows(Rotated()):
            raise NoKernelError("rotated heads only reach attention, which rotates them as it reads them")
        case Rows(Rounded()):
            raise NoKernelError("activations rounded with a static scale are only multiplied by integer weights")
        case Rows(TokenIds()):
            raise NoKernelError("token ids are only looked up in a table")
        case Rows(TableRows()):
            raise NoKernelError("rows of codes, scales and zero points are only dequantized")
        case Rows():
            raise NoKernelError("positions only become scale * cos or sin(position * frequencies)")
    raise NoKernelError("an operand is no activation")
