"""The nodes that stand for an operator of the dialect, as they are written down and put in its place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from optimc_passes.dialect.paged_attention import DOMAIN

Attribute = int | float | str | Sequence[int]


class Prologue:
    """What many replacements share, computed once before everything else: constants, masks."""

    def __init__(self) -> None:
        self.tape = Tape()
        self._constants: dict[str, ir.Value] = {}

    def constant(self, array: np.ndarray) -> ir.Value:
        """Return a constant; equal ones are one."""
        key = f"{array.dtype}{array.shape}{array.tolist()}"
        if key not in self._constants:
            self._constants[key] = self.tape.op("Constant", (), {"value": ir.tensor(array)})
        return self._constants[key]

    def ints(self, *values: int) -> ir.Value:
        """Return a constant int64 [len(values)]."""
        return self.constant(np.array(values, np.int64))

    def insert(self, model: ir.Model) -> None:
        """Put it at the start of the graph, and drop the import of the dialect if nothing needs it any more."""
        if self.tape.nodes:
            model.graph.insert_before(model.graph[0], self.tape.nodes)
        if all(node.domain != DOMAIN for node in model.graph):
            model.opset_imports.pop(DOMAIN, None)


class Replacement:
    """Records the nodes that replace one node."""

    def __init__(self, prologue: Prologue) -> None:
        self._tape = Tape()
        self._prologue = prologue

    def op(self, op_type: str, *inputs: ir.Value, **attributes: Attribute) -> ir.Value:
        """Add a node of one output and return it."""
        return self._tape.op(op_type, inputs, attributes)

    def split(self, value: ir.Value, sizes: Sequence[int]) -> Sequence[ir.Value]:
        """Add a Split along the last axis and return its outputs."""
        inputs = [value, self.ints(*sizes)]
        return self._tape.op_multi_out("Split", inputs, {"axis": -1}, num_outputs=len(sizes))

    def halves(self, value: ir.Value) -> Sequence[ir.Value]:
        """Add a Split into two halves along the last axis and return them."""
        return self._tape.op_multi_out("Split", [value], {"axis": -1, "num_outputs": 2}, num_outputs=2)

    def ints(self, *values: int) -> ir.Value:
        """Return a shared constant int64 [len(values)]."""
        return self._prologue.ints(*values)

    def scalar(self, value: float) -> ir.Value:
        """Return a shared constant float32 []."""
        return self._prologue.constant(np.array(value, np.float32))

    def name_after(self, node: ir.Node) -> None:
        """Call each node after the one it stands for, so that a message about it can be understood."""
        counts: Counter[str] = Counter()
        for new in self._tape.nodes:
            counts[new.op_type] += 1
            again = f"_{counts[new.op_type]}" if counts[new.op_type] > 1 else ""
            new.name = f"{node.name or node.op_type}/{new.op_type}{again}"

    def put(self, graph: ir.Graph, node: ir.Node, *results: ir.Value) -> None:
        """Replace the node; `results` take over the names, types, shapes and users of its outputs, in order."""
        ir.convenience.replace_nodes_and_values(graph, node, [node], self._tape.nodes, node.outputs, results)


def operand(node: ir.Node, index: int) -> ir.Value:
    """Return an input that the dialect's rules require."""
    value = node.inputs[index]
    assert value is not None, "verify_graph requires it"
    return value
