"""Norms and elementwise operators: each row is computed from the same row of its operands."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import onnx_ir as ir

from optimc.plan.cpu_program import Norm
from optimc_passes.emit.cpu.axes import Axes
from optimc_passes.emit.cpu.constants import Constant
from optimc_passes.emit.cpu.emitter import Emitter, label
from optimc_passes.emit.cpu.expression import Expression
from optimc_passes.emit.cpu.no_kernel import NoKernelError
from optimc_passes.emit.cpu.node_expressions import express
from optimc_passes.emit.cpu.values import Rows, Value, view_of

Given = Sequence[Value | None]


def norm(e: Emitter, node: ir.Node, given: Given) -> Rows:
    """RMSNormalization or LayerNormalization over the last axes of a row, once for each place of those before."""
    x, weight, bias = [*given, None][:3]
    if not isinstance(x, Rows):
        raise NoKernelError("an operand is no activation")
    first = x.axes.positive(node.attributes.get_int("axis", -1)) - x.axes.lead - 1
    if first < 0 or len(node.outputs) != 1:
        raise NoKernelError("a norm is taken over axes of a row, and gives nothing but its result")
    if not (isinstance(weight, Constant) and isinstance(bias, Constant | None)):
        raise NoKernelError("weight and bias of a norm are constants")
    epsilon = node.attributes.get_float("epsilon", 1e-5)
    centred = node.op_type == "LayerNormalization"
    return normed(e, label(node), x, weight, x.axes.inner[first:], epsilon, bias=bias, centred=centred)


def normed(
    e: Emitter,
    name: str,
    x: Rows,
    weight: Constant,
    shape: tuple[int, ...],
    epsilon: float,
    *,
    bias: Constant | None = None,
    centred: bool = False,
) -> Rows:
    """Norm the elements of each row in groups of `shape`, its last axes; `weight` is of that shape."""
    view = view_of(x)
    out = e.new(name, x.rows, view.width)
    e.emit(
        Norm(
            name=name,
            x=view,
            weight=e.vector(weight, shape),
            bias=None if bias is None else e.vector(bias, shape),
            epsilon=epsilon,
            heads=view.width // prod(shape),
            centred=centred,
            out=out,
        )
    )
    return Rows(out, x.axes, x.rows)


def elementwise(e: Emitter, node: ir.Node, given: Given) -> Rows:
    """An operator on each element by itself; constants are numbers or one value per element of a row."""
    rows = [value for value in given if isinstance(value, Rows)]
    if any(value.axes.inner != rows[0].axes.inner or value.rows != rows[0].rows for value in rows):
        raise NoKernelError("operands have rows of different shapes")
    inner = rows[0].axes.inner
    lead = max(value.axes.lead for value in rows)
    expression = Expression()
    steps: list[int | None] = []
    for value in given:
        if value is None:
            steps.append(None)
        elif isinstance(value, Constant) and prod(value.shape) == 1:
            steps.append(expression.constant(float(value.values().reshape(()))))
            lead = max(lead, len(value.shape) - len(inner) - 1)
        elif isinstance(value, Constant):
            steps.append(expression.vector(e.vector(value, inner)))
            lead = max(lead, len(value.shape) - len(inner) - 1)
        else:
            steps.append(expression.rows(view_of(value)))
    result = express(node, steps, expression)
    out = e.expression(label(node), expression, result, rows[0].rows, prod(inner))
    return Rows(out, Axes(lead, inner), rows[0].rows)
