"""Is a graph still what it was? Compared node by node, weights by how they are computed: nothing is read."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import numpy as np
import onnx_ir as ir

from optimc_passes.graph.weight_tensor import WeightTensor


def same_graph(left: ir.Model, right: ir.Model) -> bool:
    """Return whether nothing was changed between the two, both bound to the same weights."""
    if dict(left.opset_imports) != dict(right.opset_imports) or len(left.graph.initializers) != len(
        right.graph.initializers
    ):
        return False
    values = (
        (left.graph.inputs, right.graph.inputs),
        (left.graph.outputs, right.graph.outputs),
        (left.graph.initializers.values(), right.graph.initializers.values()),
    )
    return all(_same_values(first, second) for first, second in values) and all(
        one is not None and other is not None and _same_node(one, other)
        for one, other in zip_longest(left.graph, right.graph)
    )


def _same_node(left: ir.Node, right: ir.Node) -> bool:
    return (
        (left.op_type, left.domain, left.name) == (right.op_type, right.domain, right.name)
        and [value and value.name for value in left.inputs] == [value and value.name for value in right.inputs]
        and _same_values(left.outputs, right.outputs)
        and dict(left.attributes) == dict(right.attributes)
    )


def _same_values(left: Any, right: Any) -> bool:
    return all(
        one is not None
        and other is not None
        and (one.name, one.dtype, one.shape) == (other.name, other.dtype, other.shape)
        and _same_tensor(one.const_value, other.const_value)
        for one, other in zip_longest(left, right)
    )


def _same_tensor(left: ir.TensorProtocol | None, right: ir.TensorProtocol | None) -> bool:
    if isinstance(left, WeightTensor) and isinstance(right, WeightTensor):
        return left.store is right.store and left.expression == right.expression
    if left is None or right is None or isinstance(left, WeightTensor) or isinstance(right, WeightTensor):
        return left is right
    return left is right or (left.dtype == right.dtype and bool(np.array_equal(left.numpy(), right.numpy())))
