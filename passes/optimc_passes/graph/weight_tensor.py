"""Initializers that are computed when somebody looks: an expression bound to a weight store."""

from __future__ import annotations

import onnx_ir as ir

from optimc_passes.graph.weight_expression import Expression, Store


class WeightTensor(ir.LazyTensor):
    """An expression bound to a store, as an onnx_ir tensor. Every read computes; nothing is kept.

    Raises KeyError when the store lacks a named weight, ValueError when the expression does not fit the weight.
    """

    def __init__(self, expression: Expression, store: Store, *, name: str | None = None) -> None:
        self.expression = expression
        self.store = store
        dtype, shape = expression.describe(store)
        super().__init__(self._compute, dtype, ir.Shape(shape), name=name)

    def _compute(self) -> ir.TensorProtocol:
        array = self.expression.read(self.store)
        assert array.shape == self.shape.numpy(), (self.expression, array.shape, self.shape)
        return ir.Tensor(array, dtype=self.dtype, name=self.name)

    def __repr__(self) -> str:
        return f"WeightTensor<{self.dtype},{self.shape}>({self.expression!r})"
