"""Gives every value of a graph its precision, and puts casts at the borders: one for each value and type it is read in.

`precision.py` says what operators compute in; here the graph is walked twice. Backwards, to learn who wants half;
forwards, to give types. Constants are never cast in the graph: who reads one in half gets a rounded twin of it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from optimc_passes.dialect.weightless import is_weight
from optimc_passes.emit.tensorrt.half_tensor import SCALE_TOLERANCE, HalfTensor
from optimc_passes.emit.tensorrt.precision import Computes, computes

FLOATS = frozenset((ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16))
_FLOAT = ir.DataType.FLOAT
_TESTS = frozenset(("And", "Equal", "Greater", "GreaterOrEqual", "IsNaN", "Less", "LessOrEqual", "Not", "Or"))


def place_half_islands(model: ir.Model, half: ir.DataType) -> None:
    """Turn a float32 graph, in place, into one whose products and what lies between them are `half`.

    Inputs and declared outputs keep their types.
    """
    graph = model.graph
    islands = _Islands(graph, half)
    declared = [(value, value.dtype) for value in graph.outputs]
    for node in tuple(graph):
        islands.settle(node)
    for index, (value, dtype) in enumerate(declared):
        if dtype is not None and value.dtype != dtype:
            graph.outputs[index] = islands.renamed(value, dtype)


class _Islands:
    def __init__(self, graph: ir.Graph, half: ir.DataType) -> None:
        self._graph, self._half = graph, half
        self._ids = next((value for value in graph.inputs if value.name in ("input_ids", "tokens")), None)
        self._casts: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}
        for node in graph:
            for value in node.outputs:
                if value.dtype is None and (implied := _implied_dtype(node)) is not None:
                    value.type = ir.TensorType(implied)
        self._wants_half: dict[ir.Value, bool] = {}
        for node in reversed(graph):
            for value in node.outputs:
                self._wants_half[value] = not value.is_graph_output() and all(
                    self._accepts_half(reader) for reader, _ in value.uses()
                )

    def _accepts_half(self, reader: ir.Node) -> bool:
        how = computes(reader)
        if how in (Computes.MOVES, Computes.BETWEEN):
            return all(self._wants_half[value] for value in reader.outputs)
        return how is not Computes.FLOAT

    def settle(self, node: ir.Node) -> None:
        """Give the node its type, what it reads that type, and its results."""
        how = computes(node)
        if how is Computes.DECLARED:
            self._settle_cast(node)
            return
        if not any(_is_float(value) for value in (*_operands(node), *node.outputs)):
            return
        dtype = self._type(node, how)
        for index, value in enumerate(node.inputs):
            if value is not None and _is_float(value) and value.dtype != dtype:
                node.replace_input_with(index, self.cast(value, dtype))
        for value in node.outputs:
            if _is_float(value):
                # Types are shared with the graph this one was copied from.
                value.type = ir.TensorType(dtype)

    def _type(self, node: ir.Node, how: Computes) -> ir.DataType:
        if how is Computes.HALF:
            return self._half
        if how is Computes.FLOAT:
            return _FLOAT
        read = {value.dtype for value in _deciding(node)}
        same = read.pop() if len(read) == 1 else None
        wanted = all(self._wants_half[value] for value in node.outputs)
        if how is Computes.BETWEEN:
            return same if wanted and same is not None else _FLOAT
        if same not in (None, _FLOAT):
            return same or _FLOAT
        looks_up = node.op_type == "Gather" and node.inputs[1] is self._ids
        return self._half if wanted or (looks_up and not _deciding(node)) else _FLOAT

    def _settle_cast(self, node: ir.Node) -> None:
        """A cast to the type a value has already is none."""
        source = node.inputs[0]
        if node.op_type == "Cast" and source is not None and source.dtype == node.outputs[0].dtype:
            node.op_type = "Identity"
            node.attributes.clear()

    def cast(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        """Return the value in another type, cast once for all who ask."""
        if (value, dtype) not in self._casts:
            is_constant = value.const_value is not None
            self._casts[value, dtype] = self._twin(value, dtype) if is_constant else self._insert(value, dtype)
        return self._casts[value, dtype]

    def _insert(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        producer = value.producer()
        name = f"{value.name}.{dtype.name.lower()}"
        result = ir.Value(name=name, shape=value.shape, type=ir.TensorType(dtype))
        node = ir.node("Cast", [value], {"to": int(dtype)}, outputs=[result], name=f"{name}/Cast")
        if producer is None:
            self._graph.insert_before(self._graph[0], node)
        else:
            self._graph.insert_after(producer, node)
        return result

    def _twin(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        tensor = value.const_value
        assert tensor is not None
        name = f"{value.name}.{dtype.name.lower()}"
        is_scale = any(reader.op_type == "DequantizeLinear" for reader, _ in value.uses())
        tolerance = SCALE_TOLERANCE if is_scale else np.inf
        twin: ir.TensorProtocol = HalfTensor.of(tensor, dtype, name=name, tolerance=tolerance)
        if not is_weight(tensor):
            twin = ir.Tensor(twin.numpy(), dtype=dtype, name=name)
        result = ir.Value(name=name, shape=ir.Shape(tensor.shape.numpy()), type=ir.TensorType(dtype), const_value=twin)
        self._graph.register_initializer(result)
        return result

    def renamed(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        """Return the value in another type under its own name."""
        result = self.cast(value, dtype)
        name = value.name
        value.name = f"{name}.{value.dtype.name.lower()}" if value.dtype is not None else name
        result.name = name
        return result


def _deciding(node: ir.Node) -> list[ir.Value]:
    """Return the floating operands that have a type already: all but float32 constants, which take any."""
    floating = (value for value in _operands(node) if _is_float(value))
    return [value for value in floating if value.const_value is None or value.dtype != _FLOAT]


def _is_float(value: ir.Value) -> bool:
    return value.dtype in FLOATS


def _operands(node: ir.Node) -> Iterator[ir.Value]:
    return (value for value in node.inputs if value is not None)


def _implied_dtype(node: ir.Node) -> ir.DataType | None:
    """Return the dtype of what a node gives, from its operator and what it takes."""
    if node.op_type == "Cast":
        return ir.DataType(node.attributes["to"].as_int())
    if node.op_type in ("Shape", "Size"):
        return ir.DataType.INT64
    if node.op_type in _TESTS:
        return ir.DataType.BOOL
    if node.op_type == "QuantizeLinear":
        return ir.DataType.INT8
    deciding = 1 if node.op_type in ("Where", "DequantizeLinear") else 0
    return list(_operands(node))[deciding].dtype if node.inputs else None
