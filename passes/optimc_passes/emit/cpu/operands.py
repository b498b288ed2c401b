"""What an operation of a program reads and writes, as one table: rewrites need not know the operations apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from optimc.plan.cpu_program import Elementwise, Linear, Norm, Op, Quantize, View

_READS: dict[str, tuple[str, ...]] = {
    "embed": (),
    "norm": ("x", "before", "after"),
    "quantize": ("x",),
    "linear": ("x", "residual"),
    "rotation": (),
    "attention": ("rotation", "q", "k", "v"),
    "elementwise": (),
    "gather_rows": ("x",),
    "permute": ("x",),
}
"""Fields that hold float views an operation reads; an elementwise operation also has `inputs`."""
_WRITES: dict[str, tuple[str, ...]] = {"norm": ("sum", "out"), "quantize": ()}
"""Fields that hold float views an operation writes; `out` alone where nothing else stands."""
_WEIGHTS = ("table", "weight", "bias", "frequencies", "permutation")
"""Fields that name a weight; an elementwise operation also has `vectors`."""


def reads(op: Op) -> list[View]:
    """Return the float views the operation reads."""
    inputs = op.inputs if isinstance(op, Elementwise) else ()
    return [*_views(op, _READS[op.op]), *inputs]


def writes(op: Op) -> list[View]:
    """Return the float views the operation writes."""
    return list(_views(op, _WRITES.get(op.op, ("out",))))


def buffers_read(op: Op) -> set[int]:
    """Return the buffers of either kind the operation reads."""
    quantized = {op.quantized} if isinstance(op, Linear) and op.quantized is not None else set()
    return {view.buffer for view in reads(op)} | quantized


def buffers_written(op: Op) -> set[int]:
    """Return the buffers of either kind the operation writes."""
    quantized = {op.quantized} if isinstance(op, Norm | Quantize) and op.quantized is not None else set()
    return {view.buffer for view in writes(op)} | quantized


def weights(op: Op) -> list[str]:
    """Return the names of the weights the operation reads."""
    named = [name for field in _WEIGHTS if (name := getattr(op, field, None)) is not None]
    return [*named, *(op.vectors if isinstance(op, Elementwise) else ())]


def with_views(op: Op, read: Callable[[View], View], write: Callable[[View], View]) -> Op:
    """Return the operation with its float views replaced."""
    changed: dict[str, Any] = {}
    for fields, change in ((_READS[op.op], read), (_WRITES.get(op.op, ("out",)), write)):
        for field in fields:
            view = getattr(op, field)
            if view is not None:
                changed[field] = change(view)
    if isinstance(op, Elementwise):
        changed["inputs"] = tuple(read(view) for view in op.inputs)
    return op.model_copy(update=changed)


def reading_ends(ops: Sequence[Op]) -> list[int]:
    """Return, for each operation, the place of the one by whose end all threads have read its operands.

    That is its own, but for operations that round: each thread may round all rows for itself, and then none waits for
    the others before the next operation that does not.
    """
    ends = list(range(len(ops)))
    for place in range(len(ops) - 2, -1, -1):
        if isinstance(op := ops[place], Norm | Quantize) and op.quantized is not None:
            ends[place] = ends[place + 1]
    return ends


def overlap(first: View, second: View) -> bool:
    """Whether two views share an element."""
    return (
        first.buffer == second.buffer
        and first.column < second.column + second.width
        and second.column < first.column + first.width
    )


def _views(op: Op, fields: tuple[str, ...]) -> Iterator[View]:
    for field in fields:
        view = getattr(op, field)
        if view is not None:
            yield view
