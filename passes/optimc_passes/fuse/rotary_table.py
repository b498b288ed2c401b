"""Tables of cosines and sines as exporters build them, and the half tables that RotaryEmbedding reads.

Exporters repeat the angles so that the table is as wide as the rotated channels: (a0 a1 .. a0 a1 ..) where halves are
rotated against each other, (a0 a0 a1 a1 ..) where neighbours are.

Letters: T tokens, P positions of a table made beforehand, F angles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from optimc_passes.fuse.constants import constant_ints, constant_scalar, make_constant, static_dim
from optimc_passes.fuse.rule import typed
from optimc_passes.graph.weight_tensor import WeightTensor


class NoTableError(Exception):
    """The value is no such table; says why."""


@dataclass(frozen=True)
class ComputedTable:
    """`function(angles) * factor`, the angles [1, T, F] being repeated on the way."""

    function: str
    """Cos or Sin."""
    angles: ir.Value
    factor: float

    @property
    def num_angles(self) -> int | None:
        """F."""
        return static_dim(self.angles, -1)

    def is_of(self, function: str) -> bool:
        """Whether it is a table of this function."""
        return self.function == function

    def build(self, op: Any) -> Any:
        """Emit the half table [1, T, F]."""
        table = typed(getattr(op, self.function)(self.angles), self.angles.shape)
        if self.factor == 1.0:
            return table
        return typed(op.Mul(table, make_constant(op, np.array(self.factor, np.float32))), table.shape)


@dataclass(frozen=True)
class StoredTable:
    """Rows [P, 2 * F] of a constant, looked up by positions [1, T]."""

    table: np.ndarray
    """The half table [P, F]."""
    positions: ir.Value

    @property
    def num_angles(self) -> int:
        """F."""
        return int(self.table.shape[1])

    def is_of(self, function: str) -> bool:
        """Whether it can be of this function: at position 0 all cosines are equal, and all sines 0."""
        first = self.table[0]
        return bool((first == 0).all()) if function == "Sin" else bool((first == first[0]).all() and first[0] > 0)

    def build(self, op: Any) -> Any:
        """Emit the lookup in the half table."""
        rows = op.Gather(make_constant(op, np.ascontiguousarray(self.table)), self.positions, axis=0)
        return typed(rows, None if self.positions.shape is None else [*self.positions.shape, self.num_angles])


Table = ComputedTable | StoredTable


def trace_table(table: ir.Value, *, interleaved: bool) -> Table:
    """Read a table [1, 1, T, 2 * F], broadcast over heads. Raises NoTableError."""
    unsqueeze = table.producer()
    if unsqueeze is None or unsqueeze.op_type != "Unsqueeze" or constant_ints(unsqueeze.inputs[1]) != [1]:
        raise NoTableError("the table is not broadcast over heads")
    node = _producer(unsqueeze.inputs[0])
    factor = 1.0
    if node is not None and node.op_type == "Mul":
        scale = constant_scalar(node.inputs[1])
        if scale is None:
            raise NoTableError("the table is scaled by something that is not constant")
        factor, node = scale, _producer(node.inputs[0])
    if node is not None and node.op_type == "Gather" and factor == 1.0:
        return _stored(node, interleaved=interleaved)
    if node is None or node.op_type not in ("Cos", "Sin"):
        raise NoTableError("the table is not a cosine or sine")
    angles = _neighbours(node.inputs[0]) if interleaved else _halves(node.inputs[0])
    return ComputedTable(node.op_type, angles, factor)


def _halves(repeated: ir.Value | None) -> ir.Value:
    """Read Concat(angles, angles) along the last axis."""
    repeat = _producer(repeated)
    if repeat is None or repeat.op_type != "Concat" or len(repeat.inputs) != 2:
        raise NoTableError("the angles are not repeated")
    angles = repeat.inputs[0]
    if angles is None or angles is not repeat.inputs[1] or angles.shape is None:
        raise NoTableError("the two halves of the angles differ")
    if len(angles.shape) != 3:
        raise NoTableError(f"the angles have {len(angles.shape)} axes, not batch, tokens and angles")
    if repeat.attributes.get_int("axis", 0) not in (-1, len(angles.shape) - 1):
        raise NoTableError("the angles are not repeated along the last axis")
    return angles


def _neighbours(repeated: ir.Value | None) -> ir.Value:
    """Read Reshape(Concat(Unsqueeze(angles), Unsqueeze(angles))): each angle twice in a row."""
    flat = _producer(repeated)
    pairs = _producer(flat.inputs[0]) if flat is not None and flat.op_type == "Reshape" else None
    if flat is None or pairs is None or pairs.op_type != "Concat" or len(pairs.inputs) != 2:
        raise NoTableError("the angles are not repeated for neighbours")
    first, second = (_producer(value) for value in pairs.inputs)
    angles = first.inputs[0] if first is not None and first.op_type == "Unsqueeze" else None
    if first is None or second is None or angles is None or second.op_type != "Unsqueeze":
        raise NoTableError("the angles are not repeated for neighbours")
    if second.inputs[0] is not angles or angles.shape is None:
        raise NoTableError("neighbouring angles differ")
    if len(angles.shape) != 3:
        raise NoTableError(f"the angles have {len(angles.shape)} axes, not batch, tokens and angles")
    rank, shape = len(angles.shape), constant_ints(flat.inputs[1])
    last = ([-1], [rank])
    if constant_ints(first.inputs[1]) not in last or constant_ints(second.inputs[1]) not in last:
        raise NoTableError("the angles are not repeated along the last axis")
    frequencies = static_dim(angles, -1)
    if pairs.attributes.get_int("axis", 0) not in (-1, rank) or frequencies is None or not shape:
        raise NoTableError("the angles are not repeated along the last axis")
    if len(shape) != rank or shape[-1] != 2 * frequencies:
        raise NoTableError("pairs of angles are not laid side by side")
    return angles


def _stored(lookup: ir.Node, *, interleaved: bool) -> StoredTable:
    table, positions = lookup.inputs
    tensor = None if table is None else ir.convenience.get_const_tensor(table)
    along_rows = lookup.attributes.get_int("axis", 0) == 0
    if positions is None or positions.shape is None or len(positions.shape) != 2:
        raise NoTableError("the positions are not of batch and tokens")
    if tensor is None or isinstance(tensor, WeightTensor) or not along_rows:
        raise NoTableError("the table is not looked up in a constant by positions")
    array = tensor.numpy()
    if array.ndim != 2 or array.dtype != np.float32 or array.shape[1] % 2:
        raise NoTableError("the table is no float32 matrix of an even number of columns")
    half = array.shape[1] // 2
    first, second = (array[:, ::2], array[:, 1::2]) if interleaved else (array[:, :half], array[:, half:])
    if not np.array_equal(first, second):
        raise NoTableError("the two halves of the table differ")
    return StoredTable(first, positions)


def _producer(value: ir.Value | None) -> ir.Node | None:
    return None if value is None else value.producer()
