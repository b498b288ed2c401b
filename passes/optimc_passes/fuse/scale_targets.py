"""Where a factor behind a layer can go: the layer's weight, the norm before it, or the embedding table.

Letters: C input features, N output features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from optimc_passes.fuse.projection import Projection, as_projection, weight_of
from optimc_passes.fuse.rebuild import emit_again
from optimc_passes.fuse.row_wise import is_elementwise
from optimc_passes.graph.attach import is_matrix_transpose
from optimc_passes.graph.weight_expression import (
    Concat,
    Expression,
    Param,
    Scaled,
    Scales,
    Shifted,
    Store,
    Transposed,
    keeps_dtype,
)
from optimc_passes.graph.weight_tensor import WeightTensor
from optimc_passes.weights import Dense


class UnfoldableError(Exception):
    """The factor has to stay; says why."""

    def __init__(self, reason: str, node: ir.Node | None) -> None:
        super().__init__(reason)
        self.node = node


class NoLayerError(Exception):
    """What the factor multiplies comes from no layer."""


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
        return scaled_initializer(op, scale, factor)

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
            (result,) = emit_again(op, add, [result, scaled_initializer(op, bias, factor)])
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
        scaled = scaled_initializer(op, table, factor)
        for transpose, target in self.heads:
            transpose.replace_input_with(0, scaled)
            target.norm.replace_input_with(1, target.scaled(op, 1 / factor))
            for node in (transpose, target.norm, *target.path):
                _renamed(list(node.outputs))
        (result,) = emit_again(op, self.lookup, [scaled, ids])
        return result


Target = LayerTarget | TableTarget


def locate(y: ir.Value, factor: float) -> Target:
    """Return where a factor on `y` can go. Raises UnfoldableError, and NoLayerError if no layer gives `y`."""
    node = y.producer()
    if node is None:
        raise NoLayerError
    if node.op_type == "Gather" and _is_matrix(node.inputs[0]):
        return _table(node, factor)
    bias = _bias(node)
    product = node if bias is None else _other(node, bias).producer()
    if product is None or product.op_type != "MatMul":
        if any(step.op_type in ("MatMul", "Gemm") for step in _elementwise_before(y)):
            raise UnfoldableError(f"{node.op_type} stands between the layer and the factor", node)
        raise NoLayerError
    for value in (y, product.outputs[0]):
        if len(value.uses()) != 1 or value.is_graph_output():
            raise UnfoldableError("the layer is read without the factor too", product)
    add = None if bias is None else (node, bias)
    norm = NormTarget.before(product)
    if norm is not None:
        return LayerTarget(product, norm, add)
    projection = as_projection(product)
    if projection is None:
        raise UnfoldableError("the layer's weight is computed, or tied to another", product)
    scaled_part = projection.parts[0 if projection.dequantize is None else 1]
    if any(len(part.uses()) != 1 for part in projection.parts):
        raise UnfoldableError("the layer's weight has another reader", product)
    _check_width(scaled_part, factor, product)
    return LayerTarget(product, projection, add)


def scaled_initializer(op: Any, value: ir.Value, factor: float) -> ir.Value:
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


def _table(lookup: ir.Node, factor: float) -> TableTarget:
    table = lookup.inputs[0]
    assert table is not None
    if len(lookup.outputs[0].uses()) != 1:
        raise UnfoldableError("the embedding is read without the factor too", lookup)
    heads = []
    for reader, _ in table.uses():
        if reader is lookup:
            continue
        products = [node for node, _ in reader.outputs[0].uses()]
        target = NormTarget.before(products[0]) if len(products) == 1 and products[0].op_type == "MatMul" else None
        if not is_matrix_transpose(reader) or target is None:
            raise UnfoldableError("the table has another reader, which is no head behind a norm", reader)
        heads.append((reader, target))
    _check_width(table, factor, lookup)
    return TableTarget(lookup, tuple(heads))


def _scaled_weight(op: Any, projection: Projection, factor: float) -> ir.Value:
    if projection.dequantize is None:
        return scaled_initializer(op, projection.parts[0], factor)
    codes, scales, *zeros = projection.parts
    (weight,) = _renamed(emit_again(op, projection.dequantize, [codes, scaled_initializer(op, scales, factor), *zeros]))
    return weight


def _check_width(value: ir.Value, factor: float, node: ir.Node) -> None:
    """Raise UnfoldableError if the scaled weight would need a wider type than the stored one."""
    tensor = weight_of(value)
    for dtype in _stored(tensor.expression, tensor.store):
        if not keeps_dtype(dtype, factor):
            size = tensor.size * dtype.itemsize
            raise UnfoldableError(
                f"{factor:g} times a weight stored as {dtype} needs float32: {2 * size} bytes instead of {size}", node
            )


def _stored(expression: Expression, store: Store) -> Iterator[np.dtype]:
    """Yield the types in which the expression's weights are stored."""
    match expression:
        case Param(name):
            weight = store[name]
            assert isinstance(weight, Dense)
            yield weight.dtype
        case Scales():
            # Engines keep scales in 16 bits where they can; bfloat16 stands for any type of that width.
            yield np.dtype("bfloat16")
        case Concat(parts):
            for part in parts:
                yield from _stored(part, store)
        case Transposed(source) | Scaled(source) | Shifted(source):
            yield from _stored(source, store)


def _bias(node: ir.Node) -> ir.Value | None:
    """Return the vector that an Add adds, if it is a weight nobody else reads."""
    if node.op_type != "Add" or node.domain:
        return None
    for value in node.inputs:
        bound = value is not None and isinstance(value.const_value, WeightTensor) and len(value.uses()) == 1
        if bound and value is not None and value.shape is not None and len(value.shape) == 1:
            return value
    return None


def _other(add: ir.Node, bias: ir.Value) -> ir.Value:
    """Return what an Add adds the bias to."""
    first, second = add.inputs
    assert first is not None
    assert second is not None
    return second if first is bias else first


def _is_matrix(value: ir.Value | None) -> bool:
    return value is not None and isinstance(value.const_value, WeightTensor) and len(value.const_value.shape) == 2


def _elementwise_before(value: ir.Value) -> Iterator[ir.Node]:
    """Yield what leads to a value through elementwise operators, the first other operators included."""
    stack, seen = [value], set()
    while stack:
        node = stack.pop().producer()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            if is_elementwise(node):
                stack.extend(operand for operand in node.inputs if operand is not None)


def _renamed(values: list[ir.Value]) -> list[ir.Value]:
    """Give values new names: they no longer mean what they meant."""
    for value in values:
        value.name = f"{(value.name or '').removesuffix('.scaled')}.scaled"
    return values
