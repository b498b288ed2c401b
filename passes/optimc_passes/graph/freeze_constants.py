"""Constants that copies of a graph share cannot be written: cloning a graph copies nodes and values, not data."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from optimc_passes.graph.weight_tensor import WeightTensor


def freeze_constants(model: ir.Model) -> None:
    """Make a graph's constants read-only, in place; weights are so already, and are not read."""
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if tensor is not None and not isinstance(tensor, WeightTensor):
            value.const_value = _frozen(tensor)
    for node in model.graph:
        for name, attr in tuple(node.attributes.items()):
            if attr.type == ir.AttributeType.TENSOR and not attr.is_ref():
                node.attributes[name] = ir.AttrTensor(name, _frozen(attr.as_tensor()))


def _frozen(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    array = tensor.numpy()
    if not array.flags.writeable:
        return tensor
    # A view of its own: what gave the array, torch for one, gives a writable one each time.
    view: np.ndarray = array.view()
    view.setflags(write=False)
    return ir.Tensor(view, dtype=tensor.dtype, shape=ir.Shape(tensor.shape.numpy()), name=tensor.name)
