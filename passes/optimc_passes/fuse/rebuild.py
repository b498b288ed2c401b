"""What stands between a changed value and the root of a pattern, emitted again on top of the new value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir


def rebuild(op: Any, value: ir.Value, replaced: Mapping[ir.Value, ir.Value], within: frozenset[ir.Node]) -> ir.Value:
    """Return what takes the place of `value` once the keys of `replaced` are their values.

    Nodes of `within` that depend on a replaced value are emitted again, with their attributes, names and shapes; all
    others are used as they are. What is emitted twice in one rewrite (a value that two operands need) shares nothing.
    """
    known = dict(replaced)

    def visit(old: ir.Value) -> ir.Value:
        if old not in known:
            node = old.producer()
            if node is None or node not in within:
                return old
            inputs = [None if operand is None else visit(operand) for operand in node.inputs]
            if all(new is operand for new, operand in zip(inputs, node.inputs, strict=True)):
                return old
            known.update(zip(node.outputs, emit_again(op, node, inputs), strict=True))
        return known[old]

    return visit(value)


def emit_again(
    op: Any, node: ir.Node, inputs: Sequence[ir.Value | None], changed: Mapping[str, Any] | None = None
) -> list[ir.Value]:
    """Emit the node over other inputs, with some attributes changed; its outputs keep name, shape and type."""
    outputs = [ir.Value(name=value.name, shape=value.shape, type=value.type) for value in node.outputs]
    attributes = {**node.attributes, **(changed or {})}
    op.op(node.op_type, *inputs, _domain=node.domain, _outputs=outputs, _name=node.name, **attributes)
    return outputs
