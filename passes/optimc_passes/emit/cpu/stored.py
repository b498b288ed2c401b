"""Weights as the checkpoint stores them: bf16 stays bf16, codes stay unsigned, and a transposed read is a view.

The graph's own tensors widen and transpose when they are read, which is what ONNX needs; a packer wants neither.

Letters: C input features, N output features, g quantization groups along C.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from optimc.plan.cpu_program import FloatDtype
from optimc_passes.graph.weight_expression import (
    Codes,
    Concat,
    Expression,
    Param,
    Scaled,
    Shifted,
    Store,
    TableCodes,
    TableZeros,
    Transposed,
    Zeros,
    keeps_dtype,
)
from optimc_passes.graph.weight_tensor import WeightTensor
from optimc_passes.weights import Dense, Quantized

STORED_AS: dict[np.dtype, FloatDtype] = {
    np.dtype(np.float32): "float32",
    np.dtype(ml_dtypes.bfloat16): "bfloat16",
    np.dtype(np.float16): "float16",
}
"""Dtypes kernels read; everything else is widened to float32."""


def stored_dtype(tensor: ir.TensorProtocol) -> np.dtype:
    """Return the dtype `read_stored` gives."""
    if isinstance(tensor, WeightTensor):
        return _dtype(tensor.expression, tensor.store) or tensor.dtype.numpy()
    return tensor.dtype.numpy()


def read_stored(tensor: ir.TensorProtocol) -> NDArray[Any]:
    """Return the tensor's array, floating-point weights in the dtype of the checkpoint."""
    dtype = _dtype(tensor.expression, tensor.store) if isinstance(tensor, WeightTensor) else None
    if isinstance(tensor, WeightTensor) and dtype is not None:
        return _read(tensor.expression, tensor.store).astype(dtype, copy=False)
    return tensor.numpy()


def read_codes(tensor: ir.TensorProtocol, bits: int | None = None) -> NDArray[np.uint8]:
    """Return the codes or zero points of a DequantizeLinear, unsigned, in the places they are in: `bits` bits each,
    None for as many as their ONNX type has.

    Signed ones are moved up by half the range of such a place, and so is the zero point they leave out.
    """
    half = 1 << ((bits or tensor.dtype.bitwidth) - 1)
    if isinstance(tensor, WeightTensor):
        return _read_codes(tensor.expression, tensor.store, half)
    values = tensor.numpy()
    if not tensor.dtype.is_signed():
        return values.astype(np.uint8)
    return (values.astype(np.int16) + half).astype(np.uint8)


def table_bits(tensor: ir.TensorProtocol) -> int:
    """Return the bits that hold a code of a table, of which ONNX makes a byte whatever its width: 4 or 8."""
    if isinstance(tensor, WeightTensor) and isinstance(tensor.expression, TableCodes):
        weight = tensor.store[tensor.expression.name]
        assert isinstance(weight, Quantized)
        return 4 if weight.bits <= 4 else 8
    return tensor.dtype.bitwidth


def _dtype(expression: Expression, store: Store) -> np.dtype | None:
    """Return the dtype of an expression over dense weights as they are stored; None if it is none."""
    match expression:
        case Param(name):
            weight = store[name]
            assert isinstance(weight, Dense)
            return weight.dtype if weight.dtype in STORED_AS else np.dtype(np.float32)
        case Transposed(source):
            return _dtype(source, store)
        case Concat(parts):
            dtypes = {_dtype(part, store) for part in parts}
            return dtypes.pop() if len(dtypes) == 1 else np.dtype(np.float32)
        case Scaled(source, factor):
            dtype = _dtype(source, store)
            return dtype if dtype is None or keeps_dtype(dtype, factor) else np.dtype(np.float32)
        case Shifted(source):
            return None if _dtype(source, store) is None else np.dtype(np.float32)
    return None


def _read(expression: Expression, store: Store) -> NDArray[Any]:
    match expression:
        case Param(name):
            weight = store[name]
            assert isinstance(weight, Dense)
            return weight.read().astype(_dtype(expression, store), copy=False)
        case Transposed(source):
            return _read(source, store).T
        case Concat(parts, axis):
            return _join([_read(part, store) for part in parts], axis)
        case Scaled(source, factor):
            return _widened(_read(source, store)) * np.float32(factor)
        case Shifted(source, term):
            return _widened(_read(source, store)) + np.float32(term)
    return expression.read(store)


def _widened(array: NDArray[Any]) -> NDArray[np.float32]:
    return array.astype(np.float32, copy=False)


def _read_codes(expression: Expression, store: Store, half: int) -> NDArray[np.uint8]:
    match expression:
        case Codes(name):
            weight = store[name]
            assert isinstance(weight, Quantized)
            return _moved_up(weight, half).T
        case TableCodes(name):
            weight = store[name]
            assert isinstance(weight, Quantized)
            return _moved_up(weight, half)
        case Zeros(name):
            weight = store[name]
            assert isinstance(weight, Quantized)
            assert weight.zeros is not None
            return weight.zeros.read().T
        case TableZeros():
            return expression.read(store)
        case Concat(parts, axis):
            return _join([_read_codes(part, store, half) for part in parts], axis)
    raise AssertionError(f"no codes: {expression}")


def _moved_up(weight: Quantized, half: int) -> NDArray[np.uint8]:
    codes: NDArray[np.uint8] = weight.codes.read()
    # Fewer bits than the place has: parts of different widths may be joined, under one zero point.
    shift = half - (1 << (weight.bits - 1)) if weight.symmetric else 0
    return codes + np.uint8(shift) if shift else codes


def _join(parts: Sequence[NDArray[Any]], axis: int) -> NDArray[Any]:
    """Concatenate; transposed matrices are joined as they lie in memory, and the result is transposed again."""
    parts = list(parts)
    if len({part.dtype for part in parts}) > 1:
        parts = [part.astype(np.float32) for part in parts]
    if all(part.ndim == 2 and part.flags.f_contiguous for part in parts):
        return np.concatenate([part.T for part in parts], axis=1 - axis % 2).T
    return np.concatenate(parts, axis=axis)
