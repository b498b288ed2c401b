"""MatMul(x, Transpose(W)) as a Gemm that reads W as it is stored.

A tied head shares its matrix [V, C] with the embedding lookup. Left alone, ONNX Runtime would fold the Transpose into a
second copy of the largest weight of the model.

Letters: C input features, N output features.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.tape import Tape


def read_transposed_weights_in_place(model: ir.Model) -> int:
    """Rewrite, in place, each float32 MatMul whose right operand is a transposed initializer; return how many."""
    graph = model.graph
    count = 0
    for node in tuple(graph):
        weight = _transposed_initializer(node)
        if weight is None:
            continue
        x, transpose = node.inputs[0], node.inputs[1]
        assert x is not None
        assert transpose is not None
        ir.convenience.replace_nodes_and_values(graph, node, [node], *_gemm(x, weight, node))
        producer = transpose.producer()
        assert producer is not None
        if not transpose.uses():
            graph.remove(producer, safe=True)
        count += 1
    return count


def _transposed_initializer(node: ir.Node) -> ir.Value | None:
    """Return W if the node is MatMul(x, Transpose(W)) with an initializer W [N, C], else None."""
    if node.op_type != "MatMul" or node.domain != "":
        return None
    right = node.inputs[1]
    producer = right.producer() if right is not None else None
    if producer is None or producer.op_type != "Transpose" or producer.domain != "":
        return None
    weight = producer.inputs[0]
    if weight is None or not weight.is_initializer() or weight.shape is None or len(weight.shape) != 2:
        return None
    return weight if tuple(producer.attributes.get_ints("perm", (1, 0))) == (1, 0) else None


def _gemm(x: ir.Value, weight: ir.Value, node: ir.Node) -> tuple[list[ir.Node], list[ir.Value], list[ir.Value]]:
    """Return the new nodes, the value they replace and its replacement. Gemm takes matrices only: x is flattened."""
    assert weight.shape is not None
    outputs, features = weight.shape.numpy()
    tape = Tape()
    if x.shape is not None and len(x.shape) == 2:
        result = tape.op("Gemm", [x, weight], {"transB": 1})
    else:
        rows = tape.op("Reshape", [x, tape.op("Constant", (), {"value_ints": [-1, features]})])
        product = tape.op("Gemm", [rows, weight], {"transB": 1})
        leading = tape.op("Shape", [x], {"end": -1})
        last = tape.op("Constant", (), {"value_ints": [outputs]})
        # Sizes are taken as they are: a step without logits has 0 rows, which a plain Reshape reads as "copy".
        shape = tape.op("Concat", [leading, last], {"axis": 0})
        result = tape.op("Reshape", [product, shape], {"allowzero": 1})
    return list(tape.nodes), list(node.outputs), [result]
