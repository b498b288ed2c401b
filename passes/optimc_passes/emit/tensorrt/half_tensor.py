"""Weights in half precision, rounded when somebody reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from optimc.errors import LoweringError

SCALE_TOLERANCE = 2.0**-9
"""Most a scale may change when it is stored in half: bfloat16's own rounding."""


class HalfTensor(ir.LazyTensor):
    """What `read` gives, floating numbers of this shape, in a half type. Every read computes; nothing is kept.

    Reading raises LoweringError if a finite number becomes infinite, or if one of them changes by more than
    `tolerance` of itself: a scale that float16 holds as a subnormal number would change every weight of its group.
    """

    def __init__(
        self,
        read: Callable[[], NDArray[Any]],
        half: ir.DataType,
        shape: ir.Shape,
        *,
        name: str,
        tolerance: float = np.inf,
    ) -> None:
        self._read, self._tolerance = read, tolerance
        super().__init__(self._rounded, half, shape, name=name)

    @classmethod
    def of(cls, tensor: ir.TensorProtocol, half: ir.DataType, *, name: str, tolerance: float = np.inf) -> HalfTensor:
        """Return another tensor, rounded."""
        return cls(tensor.numpy, half, ir.Shape(tensor.shape.numpy()), name=name, tolerance=tolerance)

    def _rounded(self) -> ir.TensorProtocol:
        exact = self._read()
        with np.errstate(over="ignore"):
            rounded = exact.astype(self.dtype.numpy())
        lost = self._lost(exact, rounded.astype(np.float32))
        if lost.size:
            raise LoweringError(f"{self.name}: {self.dtype} cannot hold {lost[0]:.4g}; use precision bfloat16")
        return ir.Tensor(rounded, dtype=self.dtype, name=self.name)

    def _lost(self, exact: NDArray[Any], kept: NDArray[np.float32]) -> NDArray[Any]:
        """Return the numbers that did not survive."""
        lost = np.isfinite(exact) & ~np.isfinite(kept)
        if np.isfinite(self._tolerance):
            lost |= np.abs(kept - exact) > self._tolerance * np.abs(exact)
        found: NDArray[Any] = exact[lost]
        return found
