"""Quantized tables whose rows are looked up: dequantized to half when the engine is built.

TensorRT does not gather from constant codes (seen of RTX 1.7.1: the build fails), and has no block of rows that are
looked up one by one. A table costs 2 bytes a value instead of one or a half; a step reads a row per token of it.

Letters: V rows of a table, C features.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from optimc_passes.dialect.replacement import Prologue, Replacement, operand
from optimc_passes.emit.tensorrt.block_codes import dequantized
from optimc_passes.emit.tensorrt.half_tensor import HalfTensor


def dequantize_tables(model: ir.Model, half: ir.DataType) -> None:
    """Replace Gather(codes), Gather(scales), Gather(zeros) -> DequantizeLinear by Gather(half table), in place."""
    for node in tuple(model.graph):
        lookup = None if node.op_type != "DequantizeLinear" else operand(node, 0).producer()
        if lookup is None or lookup.op_type != "Gather":
            continue
        table = _table(model.graph, node, half)
        body = Replacement(Prologue())
        rows = body.op("Gather", table, operand(lookup, 1), axis=0)
        body.name_after(lookup)
        body.put(model.graph, node, rows)


def _table(graph: ir.Graph, node: ir.Node, half: ir.DataType) -> ir.Value:
    parts = [operand(gather, 0) for value in node.inputs if value is not None and (gather := value.producer())]
    codes, scales, *zeros = [value.const_value for value in parts]
    assert codes is not None
    assert scales is not None
    group = node.attributes["block_size"].as_int()

    def read() -> NDArray[np.float32]:
        assert codes is not None
        assert scales is not None
        zero_points = zeros[0].numpy().T if zeros and zeros[0] is not None else None
        return dequantized(codes.numpy().T, scales.numpy().T, zero_points, group).T

    name = f"{(parts[0].name or '').removesuffix('.codes')}.{half.name.lower()}"
    if name not in graph.initializers:
        shape = ir.Shape(codes.shape.numpy())
        tensor = HalfTensor(read, half, shape, name=name)
        graph.register_initializer(ir.Value(name=name, shape=shape, type=ir.TensorType(half), const_value=tensor))
    return graph.initializers[name]
