"""Where a factor behind a layer goes, and how: the layer's weight, the norm before it, or the embedding table
(of one in codes, its scales).

`scale_site.py` finds the place; each target here emits the nodes around it again, over scaled weights.

Letters: C input features, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from optimc_passes.fuse.projection import Projection, weight_of
from optimc_passes.fuse.rebuild import emit_again
from optimc_passes.graph.weight_expression import Scaled
from optimc_passes.graph.weight_tensor import WeightTensor


@dataclass(frozen=True)
class NormTarget:
    """The scale [C] of the norm that a layer alone reads: one row instead of a matrix."""

    norm: ir.Node
    path: tuple[ir.Node, ...]
    """What picks rows between norm and layer, in graph order."""

    @classmethod
    def before(cls, product: ir.Node) -> NormTarget | None:
        """Return the norm that only `product` reads, or None."""
        path: list[ir.Node] = []
        value = product.inputs[0]
        while value is not None and len(value.uses()) == 1 and not value.is_graph_output():
            node = value.producer()
            if node is None or node.domain:
                return None
            if node.op_type == "RMSNormalization":
                scale = node.inputs[1]
                bound = scale is not None and isinstance(scale.const_value, WeightTensor)
                return cls(node, tuple(reversed(path))) if bound else None
            if node.op_type not in ("Gather", "Reshape"):
                return None
            path.append(node)
            value = node.inputs[0]
        return None

    def scaled(self, op: Any, factor: float) -> ir.Value:
        """Emit the norm's scale times the factor."""
        scale = self.norm.inputs[1]
        assert scale is not None
        return _scaled_initializer(op, scale, factor)

    def emit(self, op: Any, factor: float) -> ir.Value:
        """Emit norm and path again; return what the layer reads."""
        x, _ = self.norm.inputs
        (value,) = _renamed(emit_again(op, self.norm, [x, self.scaled(op, factor)]))
        for node in self.path:
            (value,) = _renamed(emit_again(op, node, [value, *node.inputs[1:]]))
        return value


@dataclass(frozen=True)
class LayerTarget:
    """The weight of a linear layer, or the norm before it, and its bias."""

    product: ir.Node
    weight: NormTarget | Projection
    bias: tuple[ir.Node, ir.Value] | None
    """The Add behind the product and the vector it adds."""

    def emit(self, op: Any, factor: float) -> ir.Value:
        """Emit the layer with the factor in its weights; return its output."""
        if isinstance(self.weight, NormTarget):
            inputs = [self.weight.emit(op, factor), self.product.inputs[1]]
        else:
            inputs = [self.product.inputs[0], _scaled_weight(op, self.weight, factor)]
        (result,) = _renamed(emit_again(op, self.product, inputs))
        if self.bias is not None:
            add, bias = self.bias
            (result,) = emit_again(op, add, [result, _scaled_initializer(op, bias, factor)])
        return result


@dataclass(frozen=True)
class TableTarget:
    """The embedding table [V, C]; a head tied to it is divided by the factor again, through the norm before it."""

    lookup: ir.Node
    heads: tuple[tuple[ir.Node, NormTarget], ...]
    """The Transpose of each tied head, and the norm that it alone reads."""

    def emit(self, op: Any, factor: float) -> ir.Value:
        """Emit the lookup; tied heads, which come later, are changed where they stand."""
        table, ids = self.lookup.inputs
        assert table is not None
        scaled = _scaled_initializer(op, table, factor)
        for transpose, target in self.heads:
            transpose.replace_input_with(0, scaled)
            target.norm.replace_input_with(1, target.scaled(op, 1 / factor))
            for node in (transpose, target.norm, *target.path):
                _renamed(list(node.outputs))
        (result,) = emit_again(op, self.lookup, [scaled, ids])
        return result


@dataclass(frozen=True)
class RowsTarget:
    """The scales [V, g] of an embedding in codes."""

    rows: ir.Node
    """The DequantizeLinear of looked-up rows."""
    lookup: ir.Node
    """The Gather of their scales."""

    def emit(self, op: Any, factor: float) -> ir.Value:
        """Emit both nodes again; the codes stay as they are."""
        table, ids = self.lookup.inputs
        assert table is not None
        (scales,) = _renamed(emit_again(op, self.lookup, [_scaled_initializer(op, table, factor), ids]))
        codes, _, *zeros = self.rows.inputs
        (result,) = emit_again(op, self.rows, [codes, scales, *zeros])
        return result


Target = LayerTarget | TableTarget | RowsTarget


def _scaled_initializer(op: Any, value: ir.Value, factor: float) -> ir.Value:
    """Emit an initializer with the factor in its expression."""
    tensor = weight_of(value)
    expression = tensor.expression
    if isinstance(expression, Scaled):
        factor *= expression.factor
        expression = expression.source
    name = _scaled_name(value.name or "")
    result: ir.Value = op.initializer(WeightTensor(Scaled(expression, factor), tensor.store, name=name))
    return result


def _scaled_name(name: str) -> str:
    """Mark a parameter's name: "x.weight" becomes "x.scaled.weight"; a value's name gets the mark at its end."""
    stem, dot, kind = name.rpartition(".")
    if "/" in kind or not dot:
        return name if name.endswith(".scaled") else f"{name}.scaled"
    return name if stem.endswith(".scaled") else f"{stem}.scaled.{kind}"


def _scaled_weight(op: Any, projection: Projection, factor: float) -> ir.Value:
    if projection.dequantize is None:
        return _scaled_initializer(op, projection.parts[0], factor)
    codes, scales, *zeros = projection.parts
    scaled = _scaled_initializer(op, scales, factor)
    (weight,) = _renamed(emit_again(op, projection.dequantize, [codes, scaled, *zeros]))
    return weight


def _renamed(values: list[ir.Value]) -> list[ir.Value]:
    """Give values new names: they no longer mean what they meant."""
    for value in values:
        value.name = f"{(value.name or '').removesuffix('.scaled')}.scaled"
    return values
