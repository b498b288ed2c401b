"""What each operator computes in: a float32 graph with islands of half precision around products.

Products (linear layers and attention) take and give half; `float_sums.py` has their terms added up in float32. Sums
along the residual stream, norms, rotations, softmax and everything nobody says otherwise about are float32, since an
error made there stays in the stream. What only hands values on, or changes them element by element, is half where it
lies between products and float32 elsewhere, so that it costs no cast of its own: gates, and biases of gates.

float16 ends at 65504. Inputs of products are norms' results, attention's (an average of values) and gates'; a gate's
product is the largest of them, for the few tokens that carry "massive activations", mostly the first of a text. Results
of products go into the residual stream, which is float32, and may be as large as it gets in one layer: models trained
in bfloat16 may exceed float16 in either place. Then infinities appear, and norms make NaN of them, which shows in the
logits; `bfloat16` is the way out.

Activations are rounded to 8 bits in float32, and products of 8-bit codes with 8-bit codes are float32 on all sides:
TensorRT-RTX 1.7.1 writes the integer sums out in the type of the product before it multiplies by the scales, and
float16 holds none above 65504.
"""

from __future__ import annotations

from enum import Enum

import onnx_ir as ir


class Computes(Enum):
    """How an operator's precision is found."""

    HALF = "half"
    """Takes and gives half."""
    FLOAT = "float32"
    """Takes and gives float32."""
    MOVES = "moves"
    """Gives what it takes: half if that is half already, or if all who read it want half."""
    BETWEEN = "between"
    """Half if what it takes is half already and all who read it want half; float32 otherwise."""
    DECLARED = "declared"
    """Says itself what it gives, and takes anything."""


_CLASSES: dict[Computes, frozenset[str]] = {
    Computes.HALF: frozenset(("MatMul", "Gemm", "Attention", "DequantizeLinear")),
    Computes.MOVES: frozenset(
        (
            "Concat",
            "Expand",
            "Gather",
            "Identity",
            "Reshape",
            "Slice",
            "Split",
            "Squeeze",
            "Transpose",
            "Unsqueeze",
        )
    ),
    Computes.BETWEEN: frozenset(
        ("Add", "Clip", "Div", "Gelu", "Mul", "Neg", "Relu", "Sigmoid", "Sub", "Swish", "Tanh")
    ),
    Computes.DECLARED: frozenset(("Cast", "Shape", "Size")),
}
_BY_OPERATOR = {operator: how for how, operators in _CLASSES.items() for operator in operators}


def computes(node: ir.Node) -> Computes:
    """Return what the operator of a node computes in."""
    if _multiplies_codes(node):
        return Computes.FLOAT
    if node.op_type == "DequantizeLinear" and any(_multiplies_codes(reader) for reader, _ in node.outputs[0].uses()):
        return Computes.FLOAT
    return _BY_OPERATOR.get(node.op_type, Computes.FLOAT)


def _multiplies_codes(node: ir.Node) -> bool:
    """Whether both operands are codes with scales that can be multiplied by afterwards: none along what is summed."""
    if node.op_type != "MatMul":
        return False
    producers = [value.producer() for value in node.inputs if value is not None]
    return all(
        producer is not None
        and producer.op_type == "DequantizeLinear"
        and not producer.attributes.get_int("block_size", 0)
        for producer in producers
    )
