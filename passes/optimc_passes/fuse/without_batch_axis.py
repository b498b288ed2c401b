"""Each operator's form once a leading axis of length 1 is gone from the values that have one.

A value has the axis if an Unsqueeze or Reshape put it there and nothing has taken it away since. Without it, an
operator is the same operator with other axes or shapes, or nothing at all where it only moved the axis.
RotaryEmbedding cannot do without: it is wrapped in an Unsqueeze and a Squeeze.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from optimc_passes.dialect import ADD_RMS_NORM, DOMAIN, GATED_ACTIVATION
from optimc_passes.fuse.constants import constant_array, constant_ints
from optimc_passes.fuse.row_wise import is_elementwise


class NoFormError(Exception):
    """The node cannot do without the axis; says why."""


@dataclass(frozen=True)
class Form:
    """How a node is emitted again."""

    kind: Literal["again", "nothing", "wrapped"] = "again"
    """`nothing`: its first input is its result."""
    has_axis: bool = True
    """Whether its outputs have the axis, which they lose."""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    """Attributes that change."""
    constants: Mapping[int, np.ndarray] = field(default_factory=dict)
    """Inputs that become other constants."""


@dataclass(frozen=True)
class Site:
    """A node, and which of its inputs have the axis."""

    node: ir.Node
    has_axis: tuple[bool, ...]

    @property
    def rank(self) -> int:
        """Largest rank of an input that has the axis, with it."""
        ranks = []
        for value, has_axis in zip(self.node.inputs, self.has_axis, strict=True):
            if has_axis:
                if value is None or value.shape is None:
                    raise NoFormError("the rank of its input is not known")
                ranks.append(len(value.shape))
        return max(ranks)

    def ints(self, index: int) -> list[int]:
        """Return a constant input."""
        numbers = constant_ints(self.node.inputs[index]) if index < len(self.node.inputs) else None
        if numbers is None:
            raise NoFormError(f"its input {index} is not a constant")
        return numbers

    def shape_without(self, index: int) -> tuple[Any, ...] | None:
        """Return the shape of an input as it will be."""
        value = self.node.inputs[index]
        if value is None or value.shape is None:
            return None
        return tuple(value.shape)[1 if self.has_axis[index] else 0 :]


def form_without_axis(site: Site) -> Form | None:
    """Return the node's form; None if it has nothing to do with the axis. Raises NoFormError."""
    node = site.node
    if not any(site.has_axis):
        if node.op_type == "Unsqueeze" and 0 in (constant_ints(node.inputs[1]) or ()):
            return _entering_unsqueeze(site)
        target = constant_ints(node.inputs[1]) if node.op_type == "Reshape" else None
        return _reshape(site) if target is not None and len(target) > 1 and target[0] == 1 else None
    if is_elementwise(node):
        return _elementwise(site)
    if node.domain == DOMAIN and node.op_type in (ADD_RMS_NORM, GATED_ACTIVATION):
        return Form()
    form = _FORMS.get(node.op_type)
    if form is None or node.domain:
        raise NoFormError("it has no form without the batch axis")
    return form(site)


def _entering_unsqueeze(site: Site) -> Form:
    axes = site.ints(1)
    if min(axes) < 0:
        raise NoFormError("it counts axes from the end")
    left = [axis - 1 for axis in axes if axis]
    return Form(constants={1: np.array(left, np.int64)}) if left else Form("nothing")


def _unsqueeze(site: Site) -> Form:
    axes = site.ints(1)
    if min(axes) <= 0:
        raise NoFormError("it adds an axis before the batch axis")
    return Form(constants={1: np.array(axes, np.int64) - 1})


def _squeeze(site: Site) -> Form:
    axes = site.ints(1)
    if axes == [0]:
        return Form("nothing", has_axis=False)
    if min(axes) <= 0:
        raise NoFormError("it removes the batch axis along with others")
    return Form(constants={1: np.array(axes, np.int64) - 1})


def _reshape(site: Site) -> Form:
    target = site.ints(1)
    if 0 in target:
        raise NoFormError("its shape copies a dimension")
    has_axis = len(target) > 1 and target[0] == 1
    left = target[1:] if has_axis else target
    shape = site.shape_without(0)
    if shape is not None and _is_shape(left, shape):
        return Form("nothing", has_axis)
    return Form(has_axis=has_axis, constants={1: np.array(left, np.int64)})


def _is_shape(target: list[int], shape: tuple[Any, ...]) -> bool:
    # If all static dimensions agree, the inferred one does too.
    return len(target) == len(shape) and all(want in (-1, have) for have, want in zip(shape, target, strict=True))


def _elementwise(site: Site) -> Form:
    rank = site.rank
    constants = {}
    for index, (value, has_axis) in enumerate(zip(site.node.inputs, site.has_axis, strict=True)):
        if has_axis or value is None:
            continue
        if value.shape is None or len(value.shape) > rank:
            raise NoFormError(f"its input {index} has another rank")
        if len(value.shape) == rank:
            array = constant_array(value)
            if array is None or array.shape[0] != 1:
                raise NoFormError(f"its input {index} has as many axes and no batch axis")
            constants[index] = array[0]
    return Form(constants=constants)


def _matmul(site: Site) -> Form:
    weight = site.node.inputs[1]
    if list(site.has_axis) != [True, False] or site.rank < 3:
        raise NoFormError("it multiplies values that both have a batch axis")
    if weight is None or weight.shape is None or len(weight.shape) != 2:
        raise NoFormError("its weight is not a matrix")
    return Form()


def _gather(site: Site) -> Form:
    axis = site.node.attributes.get_int("axis", 0)
    if site.has_axis == (False, True):
        if axis != 0:
            raise NoFormError("it looks up along another axis than the first")
        return Form()
    if site.has_axis != (True, False):
        raise NoFormError("data and indices both have a batch axis")
    return _shifted(site, axis)


def _along(default: int) -> Callable[[Site], Form]:
    """Return the form of an operator that works along its attribute `axis`."""

    def form(site: Site) -> Form:
        if not all(site.has_axis) and site.node.op_type == "Concat":
            raise NoFormError("some of its inputs have no batch axis")
        return _shifted(site, site.node.attributes.get_int("axis", default))

    return form


def _shifted(site: Site, axis: int) -> Form:
    if axis in (0, -site.rank):
        raise NoFormError("it works along the batch axis")
    return Form(attributes={"axis": axis - 1 if axis > 0 else axis})


def _slice(site: Site) -> Form:
    axes = site.ints(3)
    if any(axis in (0, -site.rank) for axis in axes):
        raise NoFormError("it cuts along the batch axis")
    return Form(constants={3: np.array([axis - 1 if axis > 0 else axis for axis in axes], np.int64)})


def _transpose(site: Site) -> Form:
    perm = tuple(site.node.attributes.get_ints("perm", ()) or ())
    if perm[:1] != (0,):
        raise NoFormError("it moves the batch axis")
    return Form(attributes={"perm": [axis - 1 for axis in perm[1:]]})


def _rotary(site: Site) -> Form:
    if not all(site.has_axis) or len(site.has_axis) != 3:
        raise NoFormError("it looks up angles by positions, or they have no batch axis")
    return Form("wrapped")


_FORMS: Mapping[str, Callable[[Site], Form]] = {
    "Concat": _along(0),
    "DequantizeLinear": _along(1),
    "Gather": _gather,
    "LogSoftmax": _along(-1),
    "MatMul": _matmul,
    "RMSNormalization": _along(-1),
    "Reshape": _reshape,
    "RotaryEmbedding": _rotary,
    "Slice": _slice,
    "Softmax": _along(-1),
    "Split": _along(0),
    "Squeeze": _squeeze,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}
