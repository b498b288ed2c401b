"""Named weights, read lazily: a store never holds more than what somebody is looking at.

Letters: C input features, N output features, G quantization group along C.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Dense:
    """A weight in a floating-point (or integer) dtype; bf16 and fp8 are ml_dtypes. Linear weights are [N, C]."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], NDArray[Any]] = field(repr=False, compare=False)
    """Return the array, shape and dtype as declared. May be called many times; nothing is cached."""

    @classmethod
    def of(cls, array: NDArray[Any]) -> Dense:
        """Wrap an array that is in memory already."""
        return cls(array.shape, array.dtype, lambda: array)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclass(frozen=True)
class Quantized:
    """A linear weight [N, C] as integer codes: w[n, c] = (codes[n, c] - zeros[n, g]) * scales[n, g], g = c // group.

    With a permutation p, codes are stored in permuted order: column j holds input feature p[j], and groups run along j.
    """

    codes: Dense
    """uint8 [N, C], one code per element, 0 .. 2**bits - 1."""
    scales: Dense
    """float32 [N, ceil(C / group)]."""
    zeros: Dense | None
    """uint8 [N, ceil(C / group)]; None means symmetric: every zero point is 2**(bits - 1)."""
    bits: int
    group: int
    """Columns per group; the last group of a row may be ragged. Equal to C for one group per row."""
    permutation: Dense | None = None
    """int32 [C], or None for the identity."""
    method: str = "rtn"
    activation_scale: float | None = None
    """Static scale of the layer's input x: it is rounded to q = clip(round(x / scale), -127, 127) and read as
    q * scale. None: the target decides how activations are rounded, if at all."""

    @classmethod
    def of(
        cls,
        codes: NDArray[np.uint8],
        scales: NDArray[np.float32],
        zeros: NDArray[np.uint8] | None,
        *,
        bits: int,
        group: int,
        method: str,
        activation_scale: float | None = None,
    ) -> Quantized:
        """Wrap codes [N, C] in the source's column order with their scales and zero points [N, g], all in memory."""
        return cls(
            codes=Dense.of(codes),
            scales=Dense.of(scales),
            zeros=None if zeros is None else Dense.of(zeros),
            bits=bits,
            group=group,
            method=method,
            activation_scale=activation_scale,
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, C)."""
        return self.codes.shape

    @property
    def symmetric(self) -> bool:
        """Whether every zero point is 2**(bits - 1)."""
        return self.zeros is None

    def rows(self, rows: NDArray[np.integer]) -> Quantized:
        """Return some rows, in memory."""
        return replace(
            self,
            codes=Dense.of(self.codes.read()[rows]),
            scales=Dense.of(self.scales.read()[rows]),
            zeros=None if self.zeros is None else Dense.of(self.zeros.read()[rows]),
        )

    def dequantize(self) -> NDArray[np.float32]:
        """Return the weight as float32 [N, C], in the source's column order."""
        columns = self.codes.shape[1]
        groups = np.arange(columns) // self.group
        codes = self.codes.read().astype(np.float32)
        zeros = (
            np.float32(2 ** (self.bits - 1)) if self.zeros is None else self.zeros.read()[:, groups].astype(np.float32)
        )
        stored = (codes - zeros) * self.scales.read().astype(np.float32)[:, groups]
        if self.permutation is None:
            return stored
        weight = np.empty_like(stored)
        weight[:, self.permutation.read()] = stored
        return weight


Weight = Dense | Quantized


class WeightStore(Mapping[str, Weight]):
    """An immutable mapping from parameter name to weight. `replace` returns a new store that shares the rest."""

    def __init__(self, weights: Mapping[str, Weight]) -> None:
        self._weights = dict(weights)

    def __getitem__(self, name: str) -> Weight:
        return self._weights[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def replace(self, changed: Mapping[str, Weight]) -> WeightStore:
        """Return a store with `changed` put over this one; every name must exist already."""
        unknown = sorted(set(changed) - set(self._weights))
        if unknown:
            raise KeyError(f"weights not in the store: {unknown[:5]}")
        return WeightStore({**self._weights, **changed})
