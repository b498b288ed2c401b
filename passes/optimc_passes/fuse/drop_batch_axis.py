"""The axis of length 1 in front of the tokens goes: [1, T, C] becomes [T, C], and with it most Reshape nodes."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript.rewriter.pattern import MatchResult

from optimc_passes.fuse.constants import constant_ints, make_constant, make_ints
from optimc_passes.fuse.rebuild import emit_again
from optimc_passes.fuse.rule import ACCEPTED, FusionPass, NoOptions, Rule, declined, typed
from optimc_passes.fuse.without_batch_axis import Form, NoFormError, Site, form_without_axis

NOT_FIRST = "it removes another axis than the first"
WITHOUT = "only rotations have a batch axis, which their operator asks for"


class FromEntryToSqueeze(Rule):
    """Squeeze(f(Unsqueeze(x))) becomes f(x), f being all of the model.

    The pattern is the Squeeze that leaves the axis behind; `check` looks at everything it depends on, so one rewrite
    does the whole graph.
    """

    already = frozenset({WITHOUT})
    unrelated = frozenset({NOT_FIRST})

    def pattern(self, op: Any, x: Any, axes: Any) -> Any:
        """Match a Squeeze."""
        return op.Squeeze(x, axes, _outputs=["squeezed"])

    def check(self, _context: Any, axes: ir.Value, squeezed: ir.Value, **_: Any) -> MatchResult:
        """Decline where an operator has no form without the axis, or somebody else reads a value with it."""
        root = squeezed.producer()
        assert root is not None
        if constant_ints(axes) != [0]:
            return declined(NOT_FIRST, root)
        plan = _plan(root)
        if isinstance(plan, MatchResult):
            return plan
        moves = {"Squeeze", "Unsqueeze", "Reshape", "RotaryEmbedding"}
        if all(form is None or node.op_type in moves for node, form in plan):
            return declined(WITHOUT, root)
        return ACCEPTED

    def rewrite(self, op: Any, squeezed: ir.Value, **_: Any) -> Any:
        """Emit everything again without the axis."""
        root = squeezed.producer()
        assert root is not None
        plan = _plan(root)
        assert not isinstance(plan, MatchResult), "check found it possible"
        replaced: dict[ir.Value, ir.Value] = {}
        batched: dict[ir.Value, ir.Value] = {}
        for node, form in plan:
            inputs = [None if value is None else replaced.get(value, value) for value in node.inputs]
            replaced.update(zip(node.outputs, _emit(op, node, form, inputs, batched), strict=True))
        return replaced[squeezed]


class DropBatchAxis(FusionPass[NoOptions]):
    """[1, T, C] becomes [T, C] in the whole graph; Unsqueeze, Squeeze and Reshape nodes around it go."""

    name = "drop_batch_axis"
    version = 1
    config_type = NoOptions
    rules = (FromEntryToSqueeze,)


def _plan(root: ir.Node) -> list[tuple[ir.Node, Form | None]] | MatchResult:
    """Return the nodes to be emitted again, in graph order, each with its form, None for as it is; or why not."""
    graph = root.graph
    assert graph is not None
    needed = _ancestors(root)
    with_axis: set[ir.Value] = set()
    changed: set[ir.Value] = set()
    plan: list[tuple[ir.Node, Form | None]] = []
    for node in graph:
        site = Site(node, tuple(value in with_axis for value in node.inputs))
        if node not in needed:
            if any(site.has_axis):
                return declined(f"{node.op_type} reads a value with the axis beside what leads to the end", node)
            continue
        try:
            form = form_without_axis(site)
        except NoFormError as error:
            return declined(f"{node.op_type}: {error}", node)
        if form is not None or any(value in changed for value in node.inputs):
            plan.append((node, form))
            changed.update(node.outputs)
            if form is not None and form.has_axis:
                with_axis.update(node.outputs)
    return plan


def _emit(
    op: Any, node: ir.Node, form: Form | None, inputs: list[ir.Value | None], batched: dict[ir.Value, ir.Value]
) -> list[ir.Value]:
    """Emit a node again over inputs without the axis; `batched` are values that got one for a rotation."""
    if form is None:
        return emit_again(op, node, inputs)
    if form.kind == "nothing":
        assert inputs[0] is not None
        return [inputs[0]]
    if form.kind == "wrapped":
        return [_wrapped(op, node, inputs, batched)]
    for index, array in form.constants.items():
        inputs[index] = make_constant(op, array)
    outputs = emit_again(op, node, inputs, form.attributes)
    if form.has_axis:
        for value in outputs:
            value.shape = None if value.shape is None else ir.Shape(value.shape[1:])
    return outputs


def _wrapped(op: Any, node: ir.Node, inputs: list[ir.Value | None], batched: dict[ir.Value, ir.Value]) -> ir.Value:
    """Emit the node between an Unsqueeze of each input, of a table once for all layers, and a Squeeze."""
    (output,) = node.outputs
    for value in inputs:
        if value is not None and value not in batched:
            shape = None if value.shape is None else [1, *value.shape]
            batched[value] = typed(op.Unsqueeze(value, make_ints(op, 0)), shape)
    (rotated,) = emit_again(op, node, [batched[value] for value in inputs if value is not None])
    rotated.name = f"{output.name}.batch"
    squeezed = op.Squeeze(rotated, make_ints(op, 0), _outputs=[output.name])
    return typed(squeezed, None if output.shape is None else output.shape[1:])


def _ancestors(root: ir.Node) -> set[ir.Node]:
    """Return the node and all that it depends on."""
    found = {root}
    stack = [root]
    while stack:
        for value in stack.pop().inputs:
            producer = None if value is None else value.producer()
            if producer is not None and producer not in found:
                found.add(producer)
                stack.append(producer)
    return found
