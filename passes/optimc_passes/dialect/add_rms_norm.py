"""What `optimc::AddRmsNorm` means: a residual is added and the sum is normed; both are wanted.

Letters: C features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

ADD_RMS_NORM = "AddRmsNorm"


@dataclass(frozen=True, slots=True)
class AddRmsNorm:
    """The attributes of one node."""

    epsilon: float

    @classmethod
    def from_node(cls, node: ir.Node) -> AddRmsNorm:
        """Read a node that obeys the dialect's rules (see `rules.verify_graph`)."""
        return cls(epsilon=node.attributes["epsilon"].as_float())


def add_rms_norm(
    spec: AddRmsNorm, x: NDArray[Any], residual: NDArray[Any], scale: NDArray[Any]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return x + residual and that sum normed, both [..., C] in the dtype of x; `scale` is [C]."""
    total = x + residual
    return total, rms_normalize(total, scale, spec.epsilon)


def rms_normalize(x: NDArray[Any], scale: NDArray[Any], epsilon: float) -> NDArray[Any]:
    """Return x / sqrt(mean(x^2) + epsilon) * scale over the last axis, in the dtype of x: ONNX's RMSNormalization."""
    mean = np.mean(x * x, axis=-1, keepdims=True, dtype=x.dtype)
    normed: NDArray[Any] = x / np.sqrt(mean + x.dtype.type(epsilon)) * scale
    return normed
