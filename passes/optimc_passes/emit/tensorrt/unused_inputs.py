"""Inputs of a graph that no output depends on: TensorRT accepts them in silence, and an executor would feed them."""

from __future__ import annotations

import onnx_ir as ir

from optimc.errors import LoweringError


def refuse_unused_inputs(graph: ir.Graph) -> None:
    """Raise LoweringError naming every input that no output depends on."""
    reached: set[ir.Value] = set()
    pending = list(graph.outputs)
    while pending:
        value = pending.pop()
        if value in reached:
            continue
        reached.add(value)
        node = value.producer()
        pending += [each for each in node.inputs if each is not None] if node is not None else []
    unused = [f"'{value.name}'" for value in graph.inputs if value not in reached]
    if unused:
        raise LoweringError(
            f"nothing in the graph for TensorRT reads {', '.join(unused)}; a pass cut them off, leave it out"
        )
