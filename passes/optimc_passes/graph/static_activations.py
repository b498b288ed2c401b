"""Activations that are rounded to 8 bits with a scale known beforehand, as a graph says it.

    x [..., C] float32 -> Clip(-127 scale) -> QuantizeLinear(scale, 0) int8 -> DequantizeLinear(scale, 0) float32

Whoever runs the graph may multiply the int8 codes instead. What lies beyond 127 scales is cut off on both sides:
kernels for integers leave out the code -128, which ONNX by itself would use.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

LARGEST_CODE = 127
_ZERO = "activation_zero"


def lowest_rounded(scale: float) -> np.float32:
    """Return the smallest number a static scale can stand for."""
    return np.float32(-LARGEST_CODE) * np.float32(scale)


class StaticActivations:
    """Inserts the three nodes into one graph; a value asked for twice with the same scale is rounded once."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._rounded: dict[tuple[ir.Value, float], ir.Value] = {}

    def rounded(self, x: ir.Value, scale: float) -> ir.Value:
        """Return `x`, which a node computes, rounded: round(x / scale) * scale, cut off beyond 127 scales."""
        if (x, scale) not in self._rounded:
            self._rounded[x, scale] = self._insert(x, scale)
        return self._rounded[x, scale]

    def _insert(self, x: ir.Value, scale: float) -> ir.Value:
        producer = x.producer()
        assert producer is not None, "a linear layer reads a graph input"
        name = f"{x.name or 'activation'}.rounded{len(self._rounded)}"
        parameters = [self._constant(f"{name}.scale", np.float32(scale)), self._constant(_ZERO, np.int8(0))]
        lowest = self._constant(f"{name}.lowest", lowest_rounded(scale))
        clipped = ir.Value(name=f"{name}.clipped", shape=x.shape, type=ir.TensorType(ir.DataType.FLOAT))
        codes = ir.Value(name=f"{name}.codes", shape=x.shape, type=ir.TensorType(ir.DataType.INT8))
        result = ir.Value(name=name, shape=x.shape, type=ir.TensorType(ir.DataType.FLOAT))
        nodes = [
            ir.node("Clip", [x, lowest], outputs=[clipped], name=f"{name}/Clip"),
            ir.node("QuantizeLinear", [clipped, *parameters], outputs=[codes], name=f"{name}/QuantizeLinear"),
            ir.node("DequantizeLinear", [codes, *parameters], outputs=[result], name=f"{name}/DequantizeLinear"),
        ]
        self._graph.insert_after(producer, nodes)
        return result

    def _constant(self, name: str, number: np.float32 | np.int8) -> ir.Value:
        """Return the initializer `name`, made if the graph lacks it."""
        if name not in self._graph.initializers:
            tensor = ir.tensor(np.array(number), name=name)
            value = ir.Value(name=name, shape=ir.Shape([]), type=ir.TensorType(tensor.dtype), const_value=tensor)
            self._graph.register_initializer(value)
        return self._graph.initializers[name]
