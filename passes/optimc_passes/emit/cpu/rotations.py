"""What is computed from position_ids: cosines and sines of position * frequencies, and nothing else.

Letters: T tokens, F frequencies, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from optimc.plan.cpu_program import View
from optimc_passes.emit.cpu.axes import Axes
from optimc_passes.emit.cpu.constants import Constant
from optimc_passes.emit.cpu.no_kernel import NoKernelError
from optimc_passes.emit.cpu.values import Frequencies, Positions, Rotated, Rows, Value, Wave, view_of


def depends_on_positions(values: Sequence[Value | None]) -> bool:
    """Whether an operand comes from position_ids."""
    return any(
        isinstance(value, Rows) and isinstance(value.content, Positions | Frequencies | Wave) for value in values
    )


def from_positions(node: ir.Node, values: Sequence[Value | None]) -> Rows:
    """Return what an elementwise node over positions, angles or waves gives.

    Raises NoKernelError for anything but position * frequencies, its cosine and sine, and those times a number.
    """
    rows = next(value for value in values if isinstance(value, Rows))
    constant = next((value for value in values if isinstance(value, Constant)), None)
    match node.op_type, rows.content:
        case "Mul", Positions() if rows.axes.inner == (1,) and constant is not None and _is_vector(constant):
            frequencies = constant.values().astype(np.float32).reshape(-1)
            return Rows(Frequencies(frequencies), Axes(rows.axes.lead, (len(frequencies),)))
        case "Cos" | "Sin", Frequencies() as frequencies:
            return Rows(Wave(node.op_type.lower(), frequencies, 1.0), rows.axes)
        case "Mul", Wave(function, frequencies, 1.0) if constant is not None and np.prod(constant.shape) == 1:
            return Rows(Wave(function, frequencies, float(constant.values().reshape(()))), rows.axes)
    raise NoKernelError("positions only become scale * cos or sin(position * frequencies)")


def same_angles(cos: Value | None, sin: Value | None) -> Wave:
    """Return the cosine, after checking that the sine is of the same angles and scale."""
    if not (isinstance(cos, Rows) and isinstance(sin, Rows)):
        raise NoKernelError("the tables are not computed from position_ids")
    waves = cos.content, sin.content
    if not (isinstance(waves[0], Wave) and isinstance(waves[1], Wave)):
        raise NoKernelError("the tables are not scale * cos and sin(position * frequencies)")
    if (
        (waves[0].function, waves[1].function) != ("cos", "sin")
        or waves[0].scale != waves[1].scale
        or not np.array_equal(waves[0].frequencies.values, waves[1].frequencies.values)
    ):
        raise NoKernelError("cosines and sines are not of the same angles")
    return waves[0]


def rotate(x: Rows, rotation: View, *, heads: int, turned: int, interleaved: bool) -> Rows:
    """Return x [..., T, H * D], `turned` dimensions of each head rotated by the waves in `rotation` [T, 2 F]."""
    view = view_of(x)
    if len(x.axes.inner) != 1 or heads < 1 or view.width % heads:
        raise NoKernelError(f"{x} is not packed heads, num_heads is {heads}")
    head_dim = view.width // heads
    turned = turned or head_dim
    if turned != rotation.width or turned > head_dim:
        raise NoKernelError(f"tables of {rotation.width // 2} do not turn {turned} of {head_dim} dimensions")
    return Rows(Rotated(view, rotation, interleaved, head_dim), x.axes)


def _is_vector(constant: Constant) -> bool:
    """Whether all elements lie along the last axis."""
    return len(constant.shape) > 0 and np.prod(constant.shape) == constant.shape[-1]
