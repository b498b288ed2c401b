"""A graph as text: what goes in, one line per node, what comes out, and how the weights it reads are stored."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from optimc_passes.graph.node_text import describe_node, describe_shape
from optimc_passes.graph.weight_tensor import WeightTensor

_SMALL = 8
"""Constants of at most this many elements are written out."""


def list_graph(model: ir.Model) -> Iterator[str]:
    """Yield the lines."""
    graph = model.graph
    opsets = ", ".join(f"{domain or 'onnx'} {version}" for domain, version in sorted(model.opset_imports.items()))
    yield f"{graph.name}: {graph.num_nodes()} nodes, {opsets}"
    yield ""
    for value in graph.inputs:
        yield f"input   {_declared(value)}"
    for value in graph.outputs:
        yield f"output  {_declared(value)}"
    yield ""
    for index, node in enumerate(graph):
        yield f"{index:>5}  {describe_node(node)}"
    yield ""
    for value in graph.initializers.values():
        tensor = value.const_value
        if isinstance(tensor, WeightTensor):
            yield f"weight    {_declared(value)} = {tensor.expression}"
        elif tensor is not None:
            small = f" = {tensor.numpy().tolist()}" if tensor.size <= _SMALL else ""
            yield f"constant  {_declared(value)}{small}"


def _declared(value: ir.Value) -> str:
    dtype = value.dtype.name.lower() if value.dtype is not None else "?"
    return f"{value.name}: {dtype} {describe_shape(value.shape)}"
