"""Activations rounded with a static scale: nodes that the product behind them carries out.

Clip, QuantizeLinear and DequantizeLinear of rows move nothing. What they leave is a view and its scale, and a linear
layer with integer weights that reads it has its activations rounded with that scale instead of one per row and group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from optimc_passes.emit.cpu.constants import Constant
from optimc_passes.emit.cpu.no_kernel import NoKernelError
from optimc_passes.emit.cpu.values import Rounded, Rows, Value, view_of
from optimc_passes.graph.static_activations import lowest_rounded

Given = Sequence[Value | None]


def clips_like_kernels(node: ir.Node, given: Given) -> bool:
    """Whether a Clip of rows only leaves out the code -128 of the roundings that read it, as kernels do anyway."""
    rows, lowest, highest = [*given, None, None][:3]
    readers = [reader for reader, _ in node.outputs[0].uses()]
    if not (isinstance(rows, Rows) and isinstance(lowest, Constant) and lowest.shape == () and highest is None):
        return False
    scales = [_number(reader.inputs[1]) if reader.op_type == "QuantizeLinear" else None for reader in readers]
    low = float(lowest.values())
    return bool(scales) and all(scale is not None and low == float(lowest_rounded(scale)) for scale in scales)


def round_rows(given: Given) -> Rows:
    """QuantizeLinear of activations to int8, one scale for all."""
    x = given[0]
    view, scale = view_of(x), _scale(given)
    assert isinstance(x, Rows)
    return replace(x, content=Rounded(view, scale, is_codes=True))


def scale_codes(given: Given) -> Rows:
    """DequantizeLinear of what `round_rows` gave, with the same scale."""
    codes = given[0]
    match codes:
        case Rows(Rounded(scale=scale, is_codes=True) as rounded) if scale == _scale(given):
            return replace(codes, content=replace(rounded, is_codes=False))
    raise NoKernelError("activations are read with another scale than they were rounded with")


def _number(value: ir.Value | None) -> float | None:
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return None if tensor is None or tensor.size != 1 else float(tensor.numpy().reshape(()))


def _scale(given: Given) -> float:
    _, scale, zero = [*given, None][:3]
    if not (isinstance(scale, Constant) and isinstance(zero, Constant) and scale.shape == zero.shape == ()):
        raise NoKernelError("activations are rounded with one scale, a constant, and a zero point of int8")
    if zero.dtype != np.int8 or zero.values() != 0:
        raise NoKernelError("activations are rounded to int8 around 0")
    return float(scale.values())
