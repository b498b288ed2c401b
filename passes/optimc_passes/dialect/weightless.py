"""A model whose weights are graph inputs: what checkers of shapes, types and kernels need, and nothing more."""

from __future__ import annotations

import onnx_ir as ir

INLINE_BYTES = 1024
"""Constants below this size stay in the model: they are shapes, axes and scalars, and their values matter."""


def is_weight(tensor: ir.TensorProtocol) -> bool:
    """Whether the tensor is data rather than a small constant. Nothing is loaded."""
    return tensor.nbytes >= INLINE_BYTES


def without_weights(model: ir.Model) -> ir.Model:
    """Return a copy in which every initializer that is a weight has become a trailing graph input."""
    model = model.clone()
    graph = model.graph
    for name, value in tuple(graph.initializers.items()):
        assert value.const_value is not None
        if is_weight(value.const_value):
            del graph.initializers[name]
            value.shape = ir.Shape(value.const_value.shape.numpy())
            value.type = ir.TensorType(value.const_value.dtype)
            value.const_value = None
            graph.inputs.append(value)
    return model
