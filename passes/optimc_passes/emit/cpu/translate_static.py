"""Activations rounded with a static scale: a pair of nodes that the product behind them carries out.

QuantizeLinear and DequantizeLinear of rows move nothing. What they leave is a view and its scale, and a linear layer
with integer weights that reads it has its activations rounded with that scale instead of one per row and group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from optimc_passes.emit.cpu.constants import Constant
from optimc_passes.emit.cpu.no_kernel import NoKernelError
from optimc_passes.emit.cpu.values import Rounded, Rows, Value, view_of

Given = Sequence[Value | None]


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


def _scale(given: Given) -> float:
    _, scale, zero = [*given, None][:3]
    if not (isinstance(scale, Constant) and isinstance(zero, Constant) and scale.shape == zero.shape == ()):
        raise NoKernelError("activations are rounded with one scale, a constant, and a zero point of int8")
    if zero.dtype != np.int8 or zero.values() != 0:
        raise NoKernelError("activations are rounded to int8 around 0")
    return float(scale.values())
