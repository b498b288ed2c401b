"""The dialect's fused operators as the operations their parts would become.

What a fused operator gains on other targets, the passes after translation gain here for fused and unfused graphs alike:
norms write into the projection, attention rotates what it reads, sums and gates go into the linear layer before them.

Letters: T tokens, H query heads, Hkv key/value heads, D head dim, F frequencies, C features, I features of a gate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import onnx_ir as ir

from optimc.plan.cpu_program import View
from optimc_passes.dialect.add_rms_norm import ADD_RMS_NORM, AddRmsNorm
from optimc_passes.dialect.gated_activation import GATED_ACTIVATION, GatedActivation
from optimc_passes.dialect.rotary_qkv import ROTARY_QKV, RotaryQkv
from optimc_passes.emit.cpu.constants import Constant
from optimc_passes.emit.cpu.emitter import Emitter, label
from optimc_passes.emit.cpu.expression import Expression
from optimc_passes.emit.cpu.no_kernel import NoKernelError
from optimc_passes.emit.cpu.rotations import rotate, same_angles
from optimc_passes.emit.cpu.row_shapes import columns
from optimc_passes.emit.cpu.translate_rowwise import normed
from optimc_passes.emit.cpu.values import Rows, Value, view_of

Given = Sequence[Value | None]


def rotary_qkv(e: Emitter, node: ir.Node, given: Given) -> list[Rows]:
    """RotaryQkv of qkv [T, (H + 2 * Hkv) * D], cos and sin [T, F]: three columns, two norms, and no rotation yet."""
    spec, name = RotaryQkv.from_node(node), label(node)
    qkv, cos, sin, q_norm, k_norm = [*given, None, None, None, None][:5]
    q, k, v = (
        columns(_rows(qkv), -1, stop - width, stop)
        for width, stop in zip(spec.widths, accumulate(spec.widths), strict=True)
    )
    turned = []
    for letter, rows, heads, scale in (("q", q, spec.num_heads, q_norm), ("k", k, spec.num_kv_heads, k_norm)):
        if scale is not None:
            weight = _constant(scale)
            rows = normed(e, f"{name}.{letter}_norm", rows, weight, weight.shape, spec.epsilon)
        if cos is not None:
            rotation: View = e.rotation(name, same_angles(cos, sin))
            rows = rotate(rows, rotation, heads=heads, turned=spec.rotary_dim, interleaved=spec.interleaved)
        turned.append(rows)
    return [*turned, v]


def add_rms_norm(e: Emitter, node: ir.Node, given: Given) -> list[Rows]:
    """AddRmsNorm of x and residual [..., C]: a sum, then its norm."""
    weight, name = _constant(given[2]), label(node)
    x, residual = _alike(given[0], given[1])
    sum_of = Expression()
    result = sum_of.apply("add", sum_of.rows(view_of(x)), sum_of.rows(view_of(residual)))
    total = _expressed(e, f"{name}.sum", sum_of, result, x)
    return [total, normed(e, name, total, weight, weight.shape, AddRmsNorm.from_node(node).epsilon)]


def gated_activation(e: Emitter, node: ir.Node, given: Given) -> Rows:
    """GatedActivation of one [..., 2 * I] or two [..., I]: an expression of both halves."""
    first, second = [*given, None][:2]
    if second is None:
        whole = _rows(first)
        half = view_of(whole).width // 2
        gate, up = columns(whole, -1, 0, half), columns(whole, -1, half, 2 * half)
    else:
        gate, up = _alike(first, second)
    product = Expression()
    activated = product.apply(GatedActivation.from_node(node).activation, product.rows(view_of(gate)))
    result = product.apply("mul", activated, product.rows(view_of(up)))
    return _expressed(e, label(node), product, result, gate)


FUSED: Mapping[str, Callable[[Emitter, ir.Node, Given], Rows | list[Rows]]] = {
    ROTARY_QKV: rotary_qkv,
    ADD_RMS_NORM: add_rms_norm,
    GATED_ACTIVATION: gated_activation,
}
"""Operator to the value of its output, or of each of its outputs."""


def _alike(first: Value | None, second: Value | None) -> tuple[Rows, Rows]:
    """Return two operands as rows of one shape."""
    a, b = _rows(first), _rows(second)
    if (a.axes.inner, a.rows) != (b.axes.inner, b.rows):
        raise NoKernelError("operands have rows of different shapes")
    return a, b


def _expressed(e: Emitter, name: str, expression: Expression, result: int, like: Rows) -> Rows:
    return Rows(e.expression(name, expression, result, like.rows, like.axes.width), like.axes, like.rows)


def _rows(value: Value | None) -> Rows:
    if not isinstance(value, Rows):
        raise NoKernelError("an operand is no activation")
    return value


def _constant(value: Value | None) -> Constant:
    if not isinstance(value, Constant):
        raise NoKernelError("the weight of a norm is a constant")
    return value
