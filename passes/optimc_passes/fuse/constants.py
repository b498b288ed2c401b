"""Constants in rules: reading small tensors that are initializers or Constant nodes, never weights; making new ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from optimc_passes.graph.weight_tensor import WeightTensor

_MAX_ELEMENTS = 4096
"""Larger tensors are data. Shapes, axes, scalars and one row of frequencies are smaller."""


def constant_array(value: ir.Value | None) -> np.ndarray | None:
    """Return the value's constant, or None if it is computed, an input, absent, a weight or large."""
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    if tensor is None or isinstance(tensor, WeightTensor) or tensor.size > _MAX_ELEMENTS:
        return None
    return tensor.numpy()


def constant_ints(value: ir.Value | None) -> list[int] | None:
    """Return an integer constant as a flat list, or None if it is no integer constant."""
    array = constant_array(value)
    if array is None or not np.issubdtype(array.dtype, np.integer):
        return None
    return [int(item) for item in array.reshape(-1)]


def constant_scalar(value: ir.Value | None) -> float | None:
    """Return a floating-point constant of one element, or None."""
    array = constant_array(value)
    if array is None or array.size != 1 or not np.issubdtype(array.dtype, np.floating):
        return None
    return float(array.reshape(()))


def constant_number(value: ir.Value | None) -> float | None:
    """Return a constant of one element, whole or not, or None."""
    array = constant_array(value)
    return None if array is None or array.size != 1 or array.dtype == np.bool_ else float(array.reshape(()))


def static_dim(value: ir.Value | None, axis: int) -> int | None:
    """Return the value's extent along `axis` if its shape says so, else None."""
    if value is None or value.shape is None or not -len(value.shape) <= axis < len(value.shape):
        return None
    extent = value.shape[axis]
    return extent if isinstance(extent, int) else None


def make_ints(op: Any, *values: int) -> ir.Value:
    """Emit a constant int64 vector."""
    return make_constant(op, np.array(values, np.int64))


def make_constant(op: Any, array: np.ndarray) -> ir.Value:
    """Emit a constant; `apply_rules` makes it an initializer and shares equal ones."""
    tensor = ir.tensor(array)
    value: ir.Value = op.Constant(value=tensor)
    value.shape, value.type, value.const_value = ir.Shape(array.shape), ir.TensorType(tensor.dtype), tensor
    return value
