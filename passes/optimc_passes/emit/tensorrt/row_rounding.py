"""Activations rounded to 8 bits with one scale per row, said in operators whose scales are constants.

TensorRT's QuantizeLinear takes no scale that is computed. A row divided by what makes its largest element 127/128 can
be rounded with the scale 1/128, whatever the row, and the product of its codes is multiplied by that number afterwards:

    y[t] = r[t] * (round(128 x[t] / r[t]) / 128) · W,  r[t] = max|x[t]| * 128/127

which are the codes and the product of a scale max|x| / 127 per row. 1/128 is exact in every floating type, and nothing
grows beyond what the product itself is.

Letters: T rows, C input features, N output features.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from optimc_passes.dialect.replacement import Prologue, Replacement, operand

_STEP = 1 / 128
_SMALLEST = 1e-30
"""Divides rows of zeros."""


def round_rows(model: ir.Model) -> None:
    """Round, in place, the input of every product with an 8-bit weight of one scale per output feature.

    Products that round their input with a static scale stay as they are.
    """
    prologue = Prologue()
    rounded: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}
    for node in tuple(model.graph):
        if _multiplies_bytes(node):
            _round(model.graph, node, prologue, rounded)
    prologue.insert(model)


def _multiplies_bytes(node: ir.Node) -> bool:
    if node.op_type != "MatMul":
        return False
    x, weight = (operand(node, index).producer() for index in (0, 1))
    if weight is None or weight.op_type != "DequantizeLinear" or (x is not None and x.op_type == "DequantizeLinear"):
        return False
    codes = operand(weight, 0).const_value
    if codes is None or codes.dtype.bitwidth != 8:
        return False
    return weight.attributes.get_int("block_size", 0) >= codes.shape.numpy()[0]


def _round(
    graph: ir.Graph, node: ir.Node, prologue: Prologue, rounded: dict[ir.Value, tuple[ir.Value, ir.Value]]
) -> None:
    x = operand(node, 0)
    body = Replacement(prologue)
    if x not in rounded:
        largest = body.op("ReduceMax", body.op("Abs", x), body.ints(-1), keepdims=1)
        unit = body.op("Mul", largest, body.scalar(128 / 127))
        unit = body.op("Max", unit, body.scalar(_SMALLEST))
        parameters = body.scalar(_STEP), prologue.constant(np.array(0, np.int8))
        codes = body.op("QuantizeLinear", body.op("Div", x, unit), *parameters)
        rounded[x] = body.op("DequantizeLinear", codes, *parameters), unit
    codes, unit = rounded[x]
    codes.shape = x.shape
    result = body.op("Mul", body.op("MatMul", codes, operand(node, 1)), unit)
    body.name_after(node)
    body.put(graph, node, result)
