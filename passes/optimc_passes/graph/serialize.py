"""The graph in a file without its weights: small, and bound again to any store that has them.

Bound initializers become trailing graph inputs, as the frontend exports parameters, and how each is computed stands as
JSON in the model's metadata. The file is valid ONNX and opens in any viewer.
"""

from __future__ import annotations

import json
from typing import Any

import onnx
import onnx_ir as ir

from optimc_passes.graph.weight_expression import Store, from_json, to_json
from optimc_passes.graph.weight_tensor import WeightTensor

WEIGHTS_KEY = "optimc.weights"
"""Metadata entry: JSON object, initializer name to expression, null where the data stands in the file; in order."""


def to_bytes(model: ir.Model) -> bytes:
    """Serialize without the data of bound weights. Equal models give equal bytes; `model` is not changed."""
    model = model.clone()
    graph = model.graph
    expressions: dict[str, Any] = dict.fromkeys(graph.initializers)
    for name, value in tuple(graph.initializers.items()):
        if isinstance(value.const_value, WeightTensor):
            expressions[name] = to_json(value.const_value.expression)
            del graph.initializers[name]
            value.const_value = None
            graph.inputs.append(value)
    model.metadata_props[WEIGHTS_KEY] = json.dumps(expressions)
    return bytes(ir.to_proto(model).SerializeToString(deterministic=True))


def from_bytes(data: bytes, store: Store) -> ir.Model:
    """Read what `to_bytes` wrote and bind it to `store`.

    Raises ValueError if the bytes are not such a model, or the store's weights have other shapes or kinds than those
    it was written with; KeyError if the store lacks one.
    """
    try:
        model: ir.Model = ir.from_proto(onnx.ModelProto.FromString(data))
        expressions = json.loads(model.metadata_props.pop(WEIGHTS_KEY))
    except Exception as error:  # protobuf's own errors have no common public base
        raise ValueError(f"not a graph without weights: {error}") from error
    graph = model.graph
    inputs = {value.name: value for value in graph.inputs}
    constants = dict(graph.initializers)
    undescribed = sorted(set(constants) - set(expressions))
    if undescribed:
        raise ValueError(f"{undescribed[0]}: an initializer that is not described")
    graph.initializers.clear()
    for name, description in expressions.items():
        if description is None and name in constants:
            graph.register_initializer(constants[name])
            continue
        if name not in inputs:
            raise ValueError(f"{name}: described, but no input of the graph")
        value = inputs[name]
        tensor = WeightTensor(from_json(description), store, name=name)
        if value.dtype != tensor.dtype or value.shape != tensor.shape:
            raise ValueError(
                f"{name}: the graph wants {value.dtype} {value.shape}, the store gives {tensor.dtype} {tensor.shape}"
            )
        graph.inputs.remove(value)
        value.const_value = tensor
        graph.register_initializer(value)
    return model
