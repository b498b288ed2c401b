"""Hidden states as an output of an ONNX graph: what the output head multiplies, before it is rounded or reordered.

Letters: R rows that need logits, d hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import onnx_ir as ir
from onnx_ir.tape import Tape

from optimc.errors import LoweringError

HIDDEN = "optimc.hidden"

_BEHIND_THE_HEAD = frozenset(
    ("Add", "Cast", "Clip", "Div", "Gather", "Identity", "Mul", "Neg", "Reshape", "Squeeze", "Tanh", "Unsqueeze")
)
"""What may turn a product into logits; of two operands one is a constant."""
_ROUNDING = frozenset(("Clip", "DequantizeLinear", "Identity", "QuantizeLinear"))


class OnnxHead(NamedTuple):
    """The linear layer that ends a graph."""

    hidden: ir.Value
    """What it multiplies, float32 [..., d]."""
    weight: ir.Value
    """[d, V]"""
    order: ir.Value | None
    """int64 [d]: feature of the hidden states that each row of the weight takes; None: as they are."""
    rows: ir.Node | None
    """The Gather by logits_rows, where it lies behind the layer."""


def find_head(graph: ir.Graph) -> OnnxHead:
    """Return the output head.

    Raises LoweringError unless the graph ends in a linear layer and what changes its result element by element.
    """
    logits_rows = graph.inputs[2]
    rows, node = None, graph.outputs[0].producer()
    while node is not None and node.op_type in _BEHIND_THE_HEAD:
        if node.op_type == "Gather":
            rows = node if node.inputs[1] is logits_rows else rows
        node = _changing(node)
    if node is None or node.op_type != "MatMul":
        found = "nothing" if node is None else f"node '{node.name}' {node.op_type}"
        raise LoweringError(
            f"hidden states are asked for, and the logits come from no linear layer but from {found}; leave out the "
            "pass that needs them"
        )
    x, weight = node.inputs
    assert x is not None
    assert weight is not None
    order = None
    while (before := x.producer()) is not None:
        if before.op_type == "Gather" and before.attributes.get_int("axis", 0) == -1:
            order = before.inputs[1]
        elif before.op_type not in _ROUNDING:
            break
        below = before.inputs[0]
        assert below is not None
        x = below
    return OnnxHead(x, weight, order, rows)


def add_hidden_output(model: ir.Model, head: OnnxHead) -> None:
    """Let the graph answer what its head multiplies, [R, d], in place."""
    width = _width(head)
    tape = Tape()
    rows = head.hidden
    if head.rows is not None:
        rows = tape.op("Gather", [rows, head.rows.inputs[1]], head.rows.attributes)
    flat = tape.op("Constant", (), {"value_ints": [-1, width]})
    hidden = tape.op("Reshape", [rows, flat])
    hidden.name, hidden.type, hidden.shape = HIDDEN, ir.TensorType(ir.DataType.FLOAT), ir.Shape(["R", width])
    model.graph.extend(tape.nodes)
    model.graph.outputs.append(hidden)


def _width(head: OnnxHead) -> int:
    shape = head.weight.shape
    if shape is None or not isinstance(shape[0], int):
        raise LoweringError("hidden states are asked for, and the output head's width is not known")
    return shape[0]


def _changing(node: ir.Node) -> ir.Node | None:
    """Return the node before this one on the way to what is no constant; None if there is no one way."""
    before = [value.producer() for value in node.inputs if value is not None and value.const_value is None]
    operands = [producer for producer in before if producer is not None and producer.op_type != "Constant"]
    return operands[0] if len(operands) == 1 else None
