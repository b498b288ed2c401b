"""Operators that only rename what they are given: other axes of the same rows, or neighbouring columns of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import onnx_ir as ir

from optimc.plan.cpu_program import View
from optimc_passes.emit.cpu import axes
from optimc_passes.emit.cpu.constants import Constant
from optimc_passes.emit.cpu.no_kernel import NoKernelError
from optimc_passes.emit.cpu.values import Positions, Rows, TokenIds, Value, view_of

Given = Sequence[Value | None]


def identity(_node: ir.Node, rows: Rows, _given: Given) -> Rows:
    """Identity."""
    return rows


def cast(node: ir.Node, rows: Rows, _given: Given) -> Rows:
    """Cast of activations to what they are, and of positions to float32."""
    to = ir.DataType(node.attributes.get_int("to", 0))
    integers = isinstance(rows.content, TokenIds | Positions)
    if to == ir.DataType.FLOAT and isinstance(rows.content, TokenIds):
        raise NoKernelError("token ids are only looked up in a table")
    if to != ir.DataType.FLOAT and not (integers and to.is_integer()):
        raise NoKernelError(f"to {to.name}; activations are float32")
    return rows


def reshape(node: ir.Node, rows: Rows, given: Given) -> Rows:
    """Reshape that keeps rows rows."""
    allow_zero = bool(node.attributes.get_int("allowzero", 0))
    return rows.shaped(axes.reshape(rows.axes, _ints(given, 1), allow_zero=allow_zero))


def squeeze(_node: ir.Node, rows: Rows, given: Given) -> Rows:
    """Squeeze."""
    return rows.shaped(axes.squeeze(rows.axes, _ints(given, 1) if _has(given, 1) else None))


def unsqueeze(_node: ir.Node, rows: Rows, given: Given) -> Rows:
    """Unsqueeze."""
    return rows.shaped(axes.unsqueeze(rows.axes, _ints(given, 1)))


def split(node: ir.Node, rows: Rows, given: Given) -> list[Rows]:
    """Split along the first axis of a row."""
    axis, count = node.attributes.get_int("axis", 0), len(node.outputs)
    if _has(given, 1):
        sizes = _ints(given, 1)
    else:
        size = _size(rows, axis)
        part = -(-size // count)
        sizes = [part] * (count - 1) + [size - part * (count - 1)]
    return [columns(rows, axis, stop - size, stop) for size, stop in zip(sizes, accumulate(sizes), strict=True)]


def slice_(_node: ir.Node, rows: Rows, given: Given) -> Rows:
    """Slice along the first axis of a row, without gaps."""
    starts, ends = _ints(given, 1), _ints(given, 2)
    along = _ints(given, 3) if _has(given, 3) else list(range(len(starts)))
    steps = _ints(given, 4) if _has(given, 4) else [1] * len(starts)
    if len(along) != 1 or steps != [1]:
        raise NoKernelError(f"along axes {along} with steps {steps}")
    size = _size(rows, along[0])
    start, stop = (min(max(place + size if place < 0 else place, 0), size) for place in (starts[0], ends[0]))
    return columns(rows, along[0], start, stop)


def columns(rows: Rows, axis: int, start: int, stop: int) -> Rows:
    """Return the places [start, stop) along the first axis of a row."""
    shape, first = axes.columns(rows.axes, axis, start, stop)
    view = view_of(rows)
    return Rows(View(buffer=view.buffer, column=view.column + first, width=shape.width), shape, rows.rows)


def _size(rows: Rows, axis: int) -> int:
    """Return the size of an axis of a row."""
    place = rows.axes.positive(axis) - rows.axes.lead - 1
    if not 0 <= place < len(rows.axes.inner):
        raise NoKernelError(f"axis {axis} is no axis of a row")
    return rows.axes.inner[place]


def _has(given: Given, index: int) -> bool:
    return len(given) > index and given[index] is not None


def _ints(given: Given, index: int) -> list[int]:
    value = given[index]
    if not isinstance(value, Constant):
        raise NoKernelError("sizes or places are computed while the model runs")
    return value.ints()
