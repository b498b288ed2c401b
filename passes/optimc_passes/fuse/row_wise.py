"""Operators of which each row of the result comes from the same row of the operands."""

from __future__ import annotations

import onnx_ir as ir

from optimc_passes.dialect import ADD_RMS_NORM, DOMAIN, GATED_ACTIVATION

ELEMENTWISE = frozenset(
    {"Add", "Sub", "Mul", "Div", "Neg", "Abs", "Pow", "Exp", "Log", "Erf", "Tanh", "Sigmoid", "Softplus", "Relu"}
    | {"Gelu", "Swish", "Mish", "Elu", "Clip", "Min", "Max", "Cast", "Where", "Identity", "Sqrt", "Reciprocal"}
    | {"Cos", "Sin", "Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual", "Not", "And", "Or"}
)
"""Each element of the result depends on its own place in operands that are broadcast."""

_LAST_AXIS = frozenset({"RMSNormalization", "Softmax", "LogSoftmax", "Split", "Concat"})
"""Have an attribute `axis`, -1 where a default applies; they work along the last axis if that is where it points."""

_DEFAULT_AXIS = {"Split": 0}


_ROUNDING = frozenset({"QuantizeLinear", "DequantizeLinear"})
"""Elementwise with one scale for all; with a scale per group they are about a weight."""


def is_elementwise(node: ir.Node) -> bool:
    """Whether each element of the result depends on its own place in the operands."""
    if node.domain:
        return False
    if node.op_type in _ROUNDING:
        scale = node.inputs[1]
        return scale is not None and scale.shape is not None and len(scale.shape) == 0
    return node.op_type in ELEMENTWISE


def is_row_wise(node: ir.Node) -> bool:
    """Whether each vector along the last axis of the result comes from the vectors there in the operands."""
    if node.domain == DOMAIN:
        return node.op_type in (ADD_RMS_NORM, GATED_ACTIVATION)
    if is_elementwise(node):
        return True
    if node.op_type == "MatMul":
        weight = node.inputs[1]
        return weight is not None and weight.shape is not None and len(weight.shape) == 2
    if node.op_type == "Gather":  # by a weight's permutation
        return node.attributes.get_int("axis", 0) == -1
    if node.op_type in _LAST_AXIS:
        axis = node.attributes.get_int("axis", _DEFAULT_AXIS.get(node.op_type, -1))
        shape = node.outputs[0].shape
        return axis == -1 or (shape is not None and axis == len(shape) - 1)
    return False
