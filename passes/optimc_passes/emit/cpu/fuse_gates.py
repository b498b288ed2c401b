"""Gated activations: act(gate) * up of one product becomes the way that product ends.

Gate and up must be the halves of one linear layer, as `merge_gate_up` leaves them or the model has them, so that one
thread holds both when it is done with them. Panels of the weight then alternate between the two.
"""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from optimc.plan.cpu_program import Elementwise, GateKind, Linear, View
from optimc_passes.emit.cpu.draft import Draft, Edit
from optimc_passes.emit.cpu.weights import FloatSource, IntSource, LinearSource, VectorSource

_GATES = tuple(kind for kind in get_args(GateKind) if kind != "none")


def fuse_gates(draft: Draft) -> None:
    """Fold each gate into the linear layer that computes both its halves, where nobody else reads them."""
    edit = Edit(draft)
    for place, op in enumerate(draft.ops):
        if not isinstance(op, Elementwise):
            continue
        gated = _gated(op)
        if gated is None:
            continue
        kind, gate, up = gated
        at = edit.written_at(gate)
        linear = edit.ops[at]
        if not isinstance(linear, Linear) or len(edit.readers(gate)) != 1 or not _halves(linear.out, gate, up):
            continue
        edit.replace(place, None)
        edit.replace(at, _with_gate(edit, linear, kind, gate, up, op.out))
    edit.finish()


def _gated(op: Elementwise) -> tuple[str, View, View] | None:
    """Return kind, gate and up if the expression is act(gate) * up."""
    *_, last = op.steps
    if len(op.steps) != 4 or last.op != "mul":
        return None
    for activation, factor in ((last.a, last.b), (last.b, last.a)):
        act, up = op.steps[activation], op.steps[factor]
        if act.op in _GATES and up.op == "rows" and op.steps[act.a].op == "rows" and act.a != factor:
            return act.op, op.inputs[op.steps[act.a].a], op.inputs[up.a]
    return None


def _halves(whole: View, gate: View, up: View) -> bool:
    """Whether two views are the two halves of a third."""
    half, rest = divmod(whole.width, 2)
    both = sorted((view.column, view.width) for view in (gate, up) if view.buffer == whole.buffer)
    return not rest and both == [(0, half), (half, half)]


def _with_gate(edit: Edit, linear: Linear, kind: str, gate: View, up: View, out: View) -> Linear:
    assert linear.residual is None, "a residual has made the halves another buffer"
    draft = edit.draft
    weight = draft.weights[linear.weight]
    assert isinstance(weight, FloatSource | IntSource)
    gated: LinearSource = replace(weight, gate=(gate.column, up.column), layout="gated")
    bias = None
    if linear.bias is not None:
        vector = draft.weights[linear.bias]
        assert isinstance(vector, VectorSource)
        bias = edit.lay_out(linear.bias, vector.as_bias(gated.order()))
    key = edit.lay_out(linear.weight, gated)
    return linear.model_copy(update={"weight": key, "bias": bias, "gate": kind, "out": out})
