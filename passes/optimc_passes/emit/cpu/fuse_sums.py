"""Sums and scales that an operation before them can do on its way out: biases, residuals, the scale of embeddings."""

from __future__ import annotations

from optimc.plan.cpu_program import Elementwise, Embed, Linear, Norm, Op, View
from optimc_passes.emit.cpu.draft import Draft, Edit
from optimc_passes.emit.cpu.weights import FloatSource, IntSource, VectorSource

_LEAVES = ("rows", "vector", "constant")


def fuse_sums(draft: Draft) -> None:
    """Fold each sum or scale into the operation that computes an operand, where nobody else reads that operand."""
    edit = Edit(draft)
    for place, op in enumerate(draft.ops):
        if not isinstance(op, Elementwise) or len(op.steps) != 3:
            continue
        fused = _with_bias(edit, op) or _with_scale(edit, op) or _with_residual(edit, op)
        if fused is not None:
            at, replacement = fused
            edit.replace(place, None)
            edit.replace(at, replacement)
    edit.finish()


Fused = tuple[int, Op]
"""A place, and the operation to put there."""


def _with_bias(edit: Edit, op: Elementwise) -> Fused | None:
    """linear + vector."""
    if _operands(op, "add") != ["rows", "vector"]:
        return None
    at = edit.sole_writer(op.inputs[0])
    linear = None if at is None else edit.ops[at]
    if at is None or not isinstance(linear, Linear) or linear.bias is not None or linear.residual is not None:
        return None
    weight, vector = edit.draft.weights[linear.weight], edit.draft.weights[op.vectors[0]]
    assert isinstance(weight, FloatSource | IntSource)
    assert isinstance(vector, VectorSource)
    bias = edit.lay_out(op.vectors[0], vector.as_bias(weight.order()))
    return at, linear.model_copy(update={"bias": bias, "out": op.out})


def _with_scale(edit: Edit, op: Elementwise) -> Fused | None:
    """embedding * number."""
    if _operands(op, "mul") != ["rows", "constant"]:
        return None
    at = edit.sole_writer(op.inputs[0])
    embed = None if at is None else edit.ops[at]
    if at is None or not isinstance(embed, Embed) or embed.scale != 1.0:
        return None
    scale = next(step.value for step in op.steps if step.op == "constant")
    return at, embed.model_copy(update={"scale": scale, "out": op.out})


def _with_residual(edit: Edit, op: Elementwise) -> Fused | None:
    """linear + rows, or norm + rows; where both could take the other, the later one does."""
    if _operands(op, "add") != ["rows", "rows"] or len(op.inputs) != 2:
        return None
    candidates = []
    for mine, other in (op.inputs, op.inputs[::-1]):
        at = edit.sole_writer(mine)
        if at is not None and edit.written_at(other) < at:
            candidates.append((at, other))
    for at, other in sorted(candidates, key=lambda found: found[0], reverse=True):
        replacement = _taking(edit.ops[at], other, op.out)
        if replacement is not None:
            return at, replacement
    return None


def _taking(op: Op | None, other: View, out: View) -> Op | None:
    """Return the operation with `other` added to its result, if it can add anything."""
    if isinstance(op, Linear) and op.residual is None:
        return op.model_copy(update={"residual": other, "out": out})
    if isinstance(op, Norm) and op.after is None and op.heads == 1:
        return op.model_copy(update={"after": other, "out": out})
    return None


def _operands(op: Elementwise, kind: str) -> list[str] | None:
    """Return the kinds of the two operands of a single binary step, rows first; None if it is another step."""
    first, second, last = op.steps
    kinds = [first.op, second.op]
    if last.op != kind or not set(kinds) <= set(_LEAVES):
        return None
    return sorted(kinds, key=_LEAVES.index)
