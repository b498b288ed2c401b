"""Reading constants while matching: small tensors that are initializers or Constant nodes, never parameters."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir


def constant_array(value: ir.Value | None) -> np.ndarray | None:
    """Return the value's constant, or None if it is computed, an input or absent."""
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    return None if tensor is None else tensor.numpy()


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


def static_dim(value: ir.Value | None, axis: int) -> int | None:
    """Return the value's extent along `axis` if its shape says so, else None."""
    if value is None or value.shape is None or not -len(value.shape) <= axis < len(value.shape):
        return None
    extent = value.shape[axis]
    return extent if isinstance(extent, int) else None
