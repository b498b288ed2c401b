"""A linear layer as it stands in the graph.

A projection is MatMul(x, W) with W an initializer [C, N] or DequantizeLinear(codes [C, N], ...) of initializers, and x
possibly gathered into the order of the codes first. A bias is an Add of an initializer [N] to its output.

Letters: C input features, N output features.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from optimc_passes.graph.weight_tensor import WeightTensor


@dataclass(frozen=True)
class Projection:
    """One linear layer."""

    node: ir.Node
    """The MatMul."""
    x: ir.Value
    """Its input [..., C] before any gathering of features."""
    gather: ir.Node | None
    """The node that orders x's features for permuted codes."""
    dequantize: ir.Node | None
    """The DequantizeLinear of a quantized weight."""
    parts: tuple[ir.Value, ...]
    """Initializers: (weight,) or (codes, scales) or (codes, scales, zeros), outputs N along the last axis."""

    @property
    def width(self) -> int:
        """N."""
        return weight_of(self.parts[0]).shape.numpy()[-1]

    @property
    def label(self) -> str:
        """Name of the weight."""
        name = self.parts[0].name or "?"
        return name.removesuffix(".codes") if self.dequantize else name

    @property
    def bias(self) -> tuple[ir.Node, ir.Value] | None:
        """The Add of a bias [N] that is the only consumer of the layer's output, and the bias."""
        uses = self.node.outputs[0].uses()
        if len(uses) != 1:
            return None
        add, index = next(iter(uses))
        if add.op_type != "Add" or add.domain or add.outputs[0].is_graph_output():
            return None
        bias = add.inputs[1 - index]
        if bias is None or not _is_weight(bias, 1) or len(bias.uses()) != 1:
            return None
        return (add, bias) if weight_of(bias).shape.numpy() == (self.width,) else None

    @property
    def results(self) -> tuple[ir.Value, ...]:
        """The layer's output, and with its bias if it has one."""
        bias = self.bias
        return (self.node.outputs[0],) if bias is None else (self.node.outputs[0], bias[0].outputs[0])

    @property
    def scheme(self) -> str:
        """How the weight is stored, for comparison and for reading."""
        if self.dequantize is None:
            return "dense"
        kind = "symmetric" if len(self.parts) == 2 else "asymmetric"
        group = self.dequantize.attributes.get_int("block_size", 0)
        return f"{self.parts[0].dtype} {kind} in groups of {group}"


def as_projection(node: ir.Node) -> Projection | None:
    """Read a node as a linear layer, or return None if it is none."""
    if node.op_type != "MatMul" or node.domain:
        return None
    x, weight = node.inputs
    if x is None or weight is None:
        return None
    gather = x.producer()
    if gather is not None and _orders_features(gather):
        source = gather.inputs[0]
        assert source is not None
        x = source
    else:
        gather = None
    if _is_weight(weight, 2):
        return Projection(node, x, gather, None, (weight,))
    dequantize = weight.producer()
    if dequantize is None or dequantize.op_type != "DequantizeLinear":
        return None
    parts = tuple(value for value in dequantize.inputs if value is not None)
    if not all(_is_weight(part, 2) for part in parts):
        return None
    return Projection(node, x, gather, dequantize, parts)


def weight_of(value: ir.Value) -> WeightTensor:
    """Return the weight that one of a projection's parts, or its bias, is bound to."""
    tensor = value.const_value
    assert isinstance(tensor, WeightTensor), value
    return tensor


def _is_weight(value: ir.Value, rank: int) -> bool:
    tensor = value.const_value
    return value.is_initializer() and isinstance(tensor, WeightTensor) and len(tensor.shape) == rank


def _orders_features(node: ir.Node) -> bool:
    """Whether the node gathers along the last axis by a weight's permutation."""
    if node.op_type != "Gather" or node.domain or node.attributes.get_int("axis", 0) != -1:
        return False
    order = node.inputs[1]
    return order is not None and _is_weight(order, 1)
