"""Where can a factor behind a layer go? Into a weight of its own width that nobody else reads, or nowhere."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from optimc_passes.fuse.projection import as_projection, weight_of
from optimc_passes.fuse.row_wise import is_elementwise
from optimc_passes.fuse.scale_targets import LayerTarget, NormTarget, RowsTarget, TableTarget, Target
from optimc_passes.graph.attach import is_matrix_transpose
from optimc_passes.graph.weight_expression import (
    Concat,
    Expression,
    Param,
    Scaled,
    Scales,
    Shifted,
    Store,
    TableScales,
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


def locate(y: ir.Value, factor: float) -> Target:
    """Return where a factor on `y` can go. Raises UnfoldableError, and NoLayerError if no layer gives `y`."""
    node = y.producer()
    if node is None:
        raise NoLayerError
    if node.op_type == "Gather" and _is_matrix(node.inputs[0]):
        return _table(node, factor)
    if node.op_type == "DequantizeLinear":
        return _rows_of_codes(node, factor)
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


def _rows_of_codes(rows: ir.Node, factor: float) -> RowsTarget:
    scales = rows.inputs[1]
    lookup = None if scales is None else scales.producer()
    if lookup is None or lookup.op_type != "Gather" or not _is_matrix(lookup.inputs[0]):
        raise NoLayerError
    table = lookup.inputs[0]
    assert table is not None
    if any(len(value.uses()) != 1 for value in (table, lookup.outputs[0], rows.outputs[0])):
        raise UnfoldableError("the embedding is read without the factor too", rows)
    _check_width(table, factor, rows)
    return RowsTarget(rows, lookup)


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
        case Scales() | TableScales():
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
