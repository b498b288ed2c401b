"""Expressions over a weight store: they name weights and say how they are arranged.

An expression holds no data, is JSON, and can be bound to any store that has the named weights: `weight_tensor.py` does.
Everything floating is float32: bf16 and fp16 weights are widened when read.

Letters: C input features, N output features, V rows of a table, G quantization group along C, g = ceil(C / G).
Quantized parts come in the layout of ONNX DequantizeLinear (opset 21 and later, blocked, axis 0) on a [C, N] weight,
and those of a table whose rows are looked up as they lie in the store, [V, C] and [V, g].
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from optimc_passes.weights import Dense, Quantized, Weight

Store = Mapping[str, Weight]


@dataclass(frozen=True)
class Param:
    """A dense weight as float32, in its own shape; linear weights are [N, C]."""

    name: str

    def describe(self, store: Store) -> tuple[ir.DataType, tuple[int, ...]]:
        """Dtype and shape the expression has over `store`."""
        return ir.DataType.FLOAT, _dense(store, self.name).shape

    def read(self, store: Store) -> NDArray[Any]:
        """Compute the array."""
        return _dense(store, self.name).read().astype(np.float32, copy=False)


@dataclass(frozen=True)
class Transposed:
    """A matrix with its axes exchanged: [N, C] to [C, N]."""

    source: Expression

    def describe(self, store: Store) -> tuple[ir.DataType, tuple[int, ...]]:
        """Dtype and shape the expression has over `store`."""
        dtype, shape = self.source.describe(store)
        if len(shape) != 2:
            raise ValueError(f"only a matrix can be transposed, {self.source} has shape {list(shape)}")
        return dtype, shape[::-1]

    def read(self, store: Store) -> NDArray[Any]:
        """Compute the array."""
        return np.ascontiguousarray(self.source.read(store).T)


@dataclass(frozen=True)
class Concat:
    """Parts of one dtype and of equal shape but for `axis`, joined there."""

    parts: tuple[Expression, ...]
    axis: int

    def describe(self, store: Store) -> tuple[ir.DataType, tuple[int, ...]]:
        """Dtype and shape the expression has over `store`."""
        described = [part.describe(store) for part in self.parts]
        dtypes = {dtype for dtype, _ in described}
        shapes = [shape for _, shape in described]
        axis = self.axis
        if len(dtypes) != 1 or len({shape[:axis] + shape[axis + 1 :] for shape in shapes}) != 1:
            raise ValueError(f"parts cannot be joined along axis {axis}: {described}")
        joined = sum(shape[axis] for shape in shapes)
        return dtypes.pop(), (*shapes[0][:axis], joined, *shapes[0][axis + 1 :])

    def read(self, store: Store) -> NDArray[Any]:
        """Compute the array."""
        return np.concatenate([part.read(store) for part in self.parts], axis=self.axis)


@dataclass(frozen=True)
class Scaled:
    """Something floating times a number, float32."""

    source: Expression
    factor: float

    def describe(self, store: Store) -> tuple[ir.DataType, tuple[int, ...]]:
        """Dtype and shape the expression has over `store`."""
        return _floating(self.source, store)

    def read(self, store: Store) -> NDArray[Any]:
        """Compute the array."""
        scaled: NDArray[Any] = self.source.read(store) * np.float32(self.factor)
        return scaled


@dataclass(frozen=True)
class Shifted:
    """Something floating plus a number, float32: a norm's weight that the checkpoint counts from 1."""

    source: Expression
    term: float

    def describe(self, store: Store) -> tuple[ir.DataType, tuple[int, ...]]:
        """Dtype and shape the expression has over `store`."""
        return _floating(self.source, store)

    def read(self, store: Store) -> NDArray[Any]:
        """Compute the array."""
        shifted: NDArray[Any] = self.source.read(store) + np.float32(self.term)
        return shifted


@dataclass(frozen=True)
class Codes:
    """Codes of a quantized weight, [C, N].

    Asymmetric: unsigned codes as stored. Symmetric: signed, code - 2**(bits - 1), so that no zero points are needed.
    4-bit types up to four bits, 8-bit types above.
    """

    name: str

    def describe(self, store: Store) -> tuple[ir.DataType, tuple[int, ...]]:
        """Dtype and shape the expression has over `store`."""
        weight = _quantized(store, self.name)
        return code_dtype(weight.bits, symmetric=weight.symmetric), weight.shape[::-1]

    def read(self, store: Store) -> NDArray[Any]:
        """Compute the array."""
        weight = _quantized(store, self.name)
        codes = np.ascontiguousarray(weight.codes.read().T)
        if weight.symmetric:
            codes = (codes.astype(np.int16) - 2 ** (weight.bits - 1)).astype(np.int8)
        return codes.astype(_CODE_ARRAYS[code_dtype(weight.bits, symmetric=weight.symmetric)], copy=False)


@dataclass(frozen=True)
class Scales:
    """Scales of a quantized weight, float32 [g, N]."""

    name: str

    def describe(self, store: Store) -> tuple[ir.DataType, tuple[int, ...]]:
        """Dtype and shape the expression has over `store`."""
        return ir.DataType.FLOAT, _quantized(store, self.name).scales.shape[::-1]

    def read(self, store: Store) -> NDArray[Any]:
        """Compute the array."""
        return np.ascontiguousarray(_quantized(store, self.name).scales.read().T.astype(np.float32, copy=False))


@dataclass(frozen=True)
class Zeros:
    """Zero points of an asymmetrically quantized weight, [g, N], in the codes' dtype."""

    name: str

    def describe(self, store: Store) -> tuple[ir.DataType, tuple[int, ...]]:
        """Dtype and shape the expression has over `store`."""
        zeros = _zeros(store, self.name)
        return code_dtype(_quantized(store, self.name).bits, symmetric=False), zeros.shape[::-1]

    def read(self, store: Store) -> NDArray[Any]:
        """Compute the array."""
        dtype = code_dtype(_quantized(store, self.name).bits, symmetric=False)
        return np.ascontiguousarray(_zeros(store, self.name).read().T).astype(_CODE_ARRAYS[dtype])


@dataclass(frozen=True)
class Permutation:
    """Order of the input features in a permuted quantized weight, int64 [C]: row j of the codes takes feature p[j].

    `inverse` gives the order that puts the rows back: row p_inverse[c] of the codes belongs to feature c.
    """

    name: str
    inverse: bool = False

    def describe(self, store: Store) -> tuple[ir.DataType, tuple[int, ...]]:
        """Dtype and shape the expression has over `store`."""
        return ir.DataType.INT64, self._order(store).shape

    def read(self, store: Store) -> NDArray[Any]:
        """Compute the array."""
        order = self._order(store).read().astype(np.int64)
        return np.argsort(order) if self.inverse else order

    def _order(self, store: Store) -> Dense:
        weight = _quantized(store, self.name)
        if weight.permutation is None:
            raise ValueError(f"{self.name} is not permuted")
        return weight.permutation


@dataclass(frozen=True)
class TableCodes:
    """Codes of a quantized table, [V, C], signed if symmetric; a byte each: ONNX's Gather takes no 4-bit types."""

    name: str

    def describe(self, store: Store) -> tuple[ir.DataType, tuple[int, ...]]:
        """Dtype and shape the expression has over `store`."""
        weight = _quantized(store, self.name)
        return ir.DataType.INT8 if weight.symmetric else ir.DataType.UINT8, weight.shape

    def read(self, store: Store) -> NDArray[Any]:
        """Compute the array."""
        weight = _quantized(store, self.name)
        codes: NDArray[Any] = weight.codes.read()
        # uint8 wraps around to the bits of the signed code.
        return (codes - np.uint8(2 ** (weight.bits - 1))).view(np.int8) if weight.symmetric else codes


@dataclass(frozen=True)
class TableScales:
    """Scales of a quantized table, float32 [V, g]."""

    name: str

    def describe(self, store: Store) -> tuple[ir.DataType, tuple[int, ...]]:
        """Dtype and shape the expression has over `store`."""
        return ir.DataType.FLOAT, _quantized(store, self.name).scales.shape

    def read(self, store: Store) -> NDArray[Any]:
        """Compute the array."""
        return _quantized(store, self.name).scales.read().astype(np.float32, copy=False)


@dataclass(frozen=True)
class TableZeros:
    """Zero points of an asymmetrically quantized table, uint8 [V, g]."""

    name: str

    def describe(self, store: Store) -> tuple[ir.DataType, tuple[int, ...]]:
        """Dtype and shape the expression has over `store`."""
        return ir.DataType.UINT8, _zeros(store, self.name).shape

    def read(self, store: Store) -> NDArray[Any]:
        """Compute the array."""
        return _zeros(store, self.name).read()


Expression = (
    Param
    | Transposed
    | Concat
    | Scaled
    | Shifted
    | Codes
    | Scales
    | Zeros
    | Permutation
    | TableCodes
    | TableScales
    | TableZeros
)

_CODE_ARRAYS: dict[ir.DataType, np.dtype] = {
    ir.DataType.UINT4: np.dtype(ml_dtypes.uint4),
    ir.DataType.INT4: np.dtype(ml_dtypes.int4),
    ir.DataType.UINT8: np.dtype(np.uint8),
    ir.DataType.INT8: np.dtype(np.int8),
}
_KINDS: dict[str, type[Expression]] = {kind.__name__: kind for kind in get_args(Expression)}


def code_dtype(bits: int, *, symmetric: bool) -> ir.DataType:
    """ONNX type that holds codes of `bits` bits."""
    if not 1 <= bits <= 8:
        raise ValueError(f"codes have 1 to 8 bits, not {bits}")
    if bits <= 4:
        return ir.DataType.INT4 if symmetric else ir.DataType.UINT4
    return ir.DataType.INT8 if symmetric else ir.DataType.UINT8


def keeps_dtype(dtype: np.dtype, factor: float) -> bool:
    """Whether every weight of the dtype stays one of it when it is multiplied by a number.

    float16 has too few exponents to promise that of anything.
    """
    if dtype == np.float32:
        return True
    return dtype == ml_dtypes.bfloat16 and math.frexp(factor)[0] in (0.5, -0.5)


def to_json(expression: Expression) -> dict[str, Any]:
    """Describe an expression as JSON values; `from_json` reads it back."""
    kind = type(expression).__name__
    match expression:
        case Transposed(source):
            return {"kind": kind, "source": to_json(source)}
        case Concat(parts, axis):
            return {"kind": kind, "parts": [to_json(part) for part in parts], "axis": axis}
        case Scaled(source) | Shifted(source):
            return {"kind": kind, **vars(expression), "source": to_json(source)}
        case _:
            return {"kind": kind, **vars(expression)}


def from_json(data: Mapping[str, Any]) -> Expression:
    """Read what `to_json` wrote. Raises ValueError if it is something else."""
    fields = dict(data)
    try:
        kind = _KINDS[fields.pop("kind")]
        if "source" in fields:
            fields["source"] = from_json(fields["source"])
        if "parts" in fields:
            fields["parts"] = tuple(from_json(part) for part in fields["parts"])
        return kind(**fields)
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a weight expression: {json.dumps(data)}") from error


def _floating(source: Expression, store: Store) -> tuple[ir.DataType, tuple[int, ...]]:
    """Return dtype and shape of what is computed element by element from `source`."""
    dtype, shape = source.describe(store)
    if dtype != ir.DataType.FLOAT:
        raise ValueError(f"only float32 is scaled or shifted, {source} is {dtype}")
    return dtype, shape


def _get(store: Store, name: str) -> Weight:
    if name not in store:
        raise KeyError(f"{name} is not in the weight store")
    return store[name]


def _dense(store: Store, name: str) -> Dense:
    weight = _get(store, name)
    if not isinstance(weight, Dense):
        raise ValueError(f"{name} is quantized; a dense weight is needed")
    return weight


def _quantized(store: Store, name: str) -> Quantized:
    weight = _get(store, name)
    if not isinstance(weight, Quantized):
        raise ValueError(f"{name} is dense; a quantized weight is needed")
    return weight


def _zeros(store: Store, name: str) -> Dense:
    zeros = _quantized(store, name).zeros
    if zeros is None:
        raise ValueError(f"{name} is symmetric and has no zero points")
    return zeros
