"""What a program's weights are made of, before they are packed: each says what it will be and computes it once.

Letters: N output features, C input features, G features per group, g = ceil(C / G), V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from optimc.plan import PlanTensor
from optimc.plan.cpu_program import PANEL_ROWS, FloatDtype, FloatWeight, IntWeight, Permutation, Table, Vector, Weight
from optimc_passes.emit.cpu.constants import Constant
from optimc_passes.emit.cpu.pack_float import pack_float
from optimc_passes.emit.cpu.pack_int import fits_float16, pack_int, packed_int_bytes, refine_groups
from optimc_passes.emit.cpu.panels import gated_rows, into_panels, panel_rows
from optimc_passes.emit.cpu.stored import STORED_AS

_CONTAINER = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


class WeightSource(Protocol):
    """A weight of the program."""

    @property
    def layout(self) -> str:
        """One word: two layouts of one weight are two tensors."""
        ...

    def describe(self, tensor: str) -> Weight:
        """Return the program's entry for the weight, which lies in the plan tensor `tensor`."""
        ...

    def plan_tensor(self, tensor: str) -> PlanTensor:
        """Return the plan tensor. Nothing large is read before it is written."""
        ...


@dataclass(frozen=True, eq=False)
class VectorSource:
    """float32 [length], or [panels * 32] if it is the bias of a linear weight."""

    constant: Constant
    order: NDArray[np.int64] | None = None
    """Element at each place, -1 for 0; None for as it is."""
    layout: str = "vector"

    def describe(self, tensor: str) -> Vector:
        """Return the program's entry."""
        return Vector(tensor=tensor, length=self.constant.shape[0] if self.order is None else len(self.order))

    def plan_tensor(self, tensor: str) -> PlanTensor:
        """Return the plan tensor."""
        return PlanTensor(tensor, "F32", (self.describe(tensor).length,), self._values)

    def as_bias(self, order: NDArray[np.int64]) -> VectorSource:
        """Return the vector in the order of a weight's panels."""
        return replace(self, order=order, layout="bias")

    def _values(self) -> NDArray[np.float32]:
        values = self.constant.values().astype(np.float32, copy=False)
        return values if self.order is None else into_panels(values, self.order).reshape(-1)


@dataclass(frozen=True)
class PermutationSource:
    """int32 [C]."""

    constant: Constant
    layout: str = "permutation"

    def describe(self, tensor: str) -> Permutation:
        """Return the program's entry."""
        return Permutation(tensor=tensor, length=self.constant.shape[0])

    def plan_tensor(self, tensor: str) -> PlanTensor:
        """Return the plan tensor."""
        return PlanTensor(tensor, "I32", self.constant.shape, lambda: self.constant.values().astype(np.int32))


@dataclass(frozen=True)
class TableSource:
    """An embedding [V, C] in the dtype of the checkpoint."""

    constant: Constant
    layout: str = "table"

    def describe(self, tensor: str) -> Table:
        """Return the program's entry."""
        rows, features = self.constant.shape
        return Table(tensor=tensor, rows=rows, features=features, dtype=_float_dtype(self.constant))

    def plan_tensor(self, tensor: str) -> PlanTensor:
        """Return the plan tensor."""
        return PlanTensor(tensor, _CONTAINER[_float_dtype(self.constant)], self.constant.shape, self.constant.read)


@dataclass(frozen=True)
class FloatSource:
    """A dense linear weight, given as [C, N]."""

    constant: Constant
    gate: tuple[int, int] | None = None
    """First gate row and first up row, if panels alternate between them; each half of N."""
    layout: str = "panels"

    @property
    def outputs(self) -> int:
        """N of the graph."""
        return self.constant.shape[1]

    def order(self) -> NDArray[np.int64]:
        """Return the output at each place of the panels, -1 for padding."""
        return _order(self.outputs, self.gate)

    def describe(self, tensor: str) -> FloatWeight:
        """Return the program's entry."""
        stored = _stored_outputs(self.outputs, self.gate)
        features = self.constant.shape[0]
        return FloatWeight(tensor=tensor, outputs=stored, features=features, dtype=_float_dtype(self.constant))

    def plan_tensor(self, tensor: str) -> PlanTensor:
        """Return the plan tensor."""
        size = len(self.order()) * self.constant.shape[0] * self.constant.dtype.itemsize
        return PlanTensor(tensor, "U8", (size,), lambda: pack_float(self.constant.read().T, self.order()))


@dataclass(frozen=True)
class IntSource:
    """A linear weight in codes: `codes` [C, N] and `zeros` [g, N] unsigned, `scales` [g, N] float32."""

    codes: Constant
    scales: Constant
    zeros: Constant | None
    bits: int
    """4 or 8: how codes are stored."""
    group: int
    """G of the quantizer, at most C."""
    stored_group: int
    """G as packed; scales and zero points are repeated where it is smaller."""
    gate: tuple[int, int] | None = None
    layout: str = "codes"

    @property
    def outputs(self) -> int:
        """N of the graph."""
        return self.codes.shape[1]

    @property
    def features(self) -> int:
        """C."""
        return self.codes.shape[0]

    def order(self) -> NDArray[np.int64]:
        """Return the output at each place of the panels, -1 for padding."""
        return _order(self.outputs, self.gate)

    def describe(self, tensor: str) -> IntWeight:
        """Return the program's entry. Reads the scales: they are float16 only if that loses nothing."""
        return IntWeight(
            tensor=tensor,
            outputs=_stored_outputs(self.outputs, self.gate),
            features=self.features,
            group=self.stored_group,
            bits=4 if self.bits == 4 else 8,
            zeros=self.zeros is not None,
            wide_scales=not fits_float16(self.scales.values()),
            zero_point=0 if self.zeros is not None else 1 << (self.bits - 1),
        )

    def plan_tensor(self, tensor: str) -> PlanTensor:
        """Return the plan tensor."""
        entry, order = self.describe(tensor), self.order()
        size = packed_int_bytes(
            len(order) // PANEL_ROWS,
            self.features,
            self.stored_group,
            self.bits,
            zeros=entry.zeros,
            wide=entry.wide_scales,
        )

        def finer(parts: Constant) -> NDArray[Any]:
            return refine_groups(parts.values().T, self.features, self.group, self.stored_group)

        def pack() -> NDArray[np.uint8]:
            return pack_int(
                self.codes.read().T,
                finer(self.scales),
                None if self.zeros is None else finer(self.zeros),
                bits=self.bits,
                group=self.stored_group,
                rows=order,
                wide=entry.wide_scales,
            )

        return PlanTensor(tensor, "U8", (size,), pack)


LinearSource = FloatSource | IntSource


def _float_dtype(constant: Constant) -> FloatDtype:
    return STORED_AS[constant.dtype]


def _order(outputs: int, gate: tuple[int, int] | None) -> NDArray[np.int64]:
    return panel_rows(outputs) if gate is None else gated_rows(outputs // 2, *gate)


def _stored_outputs(outputs: int, gate: tuple[int, int] | None) -> int:
    """N as the program counts it: with a gate, the first half is padded to whole panels."""
    if gate is None:
        return outputs
    half = outputs // 2
    return len(panel_rows(half)) + half
