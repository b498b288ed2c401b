"""Values known at build time: initializers, and what is computed from them alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

from optimc_passes.emit.cpu.stored import read_stored, stored_dtype


@dataclass(frozen=True, eq=False)
class Constant:
    """An array that is computed when somebody reads it."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    """What `read` gives; a floating-point weight has the dtype of the checkpoint."""
    read: Callable[[], NDArray[Any]]
    transpose_of: Constant | None = None
    """The matrix that this is, with its axes exchanged."""

    def values(self) -> NDArray[Any]:
        """Return the array as the graph sees it: floating point is float32."""
        array = self.read()
        return array if self.dtype.kind in "iub" else array.astype(np.float32, copy=False)

    def ints(self) -> list[int]:
        """Return the elements in order."""
        return [int(value) for value in self.values().reshape(-1)]

    def transposed(self) -> Constant:
        """Return a matrix with its axes exchanged; nothing is copied."""
        return Constant(self.name, self.shape[::-1], self.dtype, lambda: self.read().T, transpose_of=self)


def initializer(value: ir.Value) -> Constant:
    """Return an initializer of the graph as a constant."""
    tensor = value.const_value
    assert tensor is not None, value
    return Constant(value.name or "", tuple(tensor.shape.numpy()), stored_dtype(tensor), lambda: read_stored(tensor))


def fold(node: ir.Node, inputs: Sequence[Constant | None], opset: int) -> Constant:
    """Return the first output of a standard node, all of whose inputs are constants, as a constant."""
    proto, output = ir.to_proto(node), node.outputs[0]
    name = output.name or ""

    def compute() -> NDArray[Any]:
        given = {
            value.name or "": constant.values()
            for value, constant in zip(node.inputs, inputs, strict=True)
            if value is not None and constant is not None
        }
        graph = onnx.helper.make_graph(
            [proto],
            "constant",
            [onnx.helper.make_empty_tensor_value_info(operand) for operand in given],
            [onnx.helper.make_empty_tensor_value_info(name)],
        )
        model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)])
        (result,) = ReferenceEvaluator(model).run([name], given)
        return np.asarray(result)

    if output.shape is not None and output.dtype is not None and output.shape.is_static():
        return Constant(name, tuple(output.shape.numpy()), output.dtype.numpy(), compute)
    array = compute()
    return Constant(name, array.shape, array.dtype, lambda: array)
