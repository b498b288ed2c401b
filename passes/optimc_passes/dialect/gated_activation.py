"""What `optimc::GatedActivation` means: one half of a row, activated, times the other half.

Letters: I features of each half.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

GATED_ACTIVATION = "GatedActivation"

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "sigmoid"]
"""`gelu` is exact, `gelu_tanh` its approximation by a hyperbolic tangent."""

ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)


@dataclass(frozen=True, slots=True)
class GatedActivation:
    """The attributes of one node."""

    activation: Activation

    @classmethod
    def from_node(cls, node: ir.Node) -> GatedActivation:
        """Read a node that obeys the dialect's rules (see `rules.verify_graph`)."""
        name = node.attributes["activation"].as_string()
        return cls(activation=next(known for known in ACTIVATIONS if known == name))


def gated_activation(spec: GatedActivation, gate: NDArray[Any], up: NDArray[Any] | None = None) -> NDArray[Any]:
    """Return activation(gate) * up, [..., I] in the dtype of `gate`.

    Without `up`, `gate` is [..., 2 * I] and holds both: the gate is its first half.
    """
    if up is None:
        gate, up = np.split(gate, 2, axis=-1)
    activated: NDArray[Any] = _MEANING[spec.activation](gate) * up
    return activated


def _sigmoid(x: NDArray[Any]) -> NDArray[Any]:
    # tanh does not overflow where exp(-x) would.
    half: NDArray[Any] = (np.tanh(x / 2) + 1) / 2
    return half


def _gelu(x: NDArray[Any]) -> NDArray[Any]:
    erf = np.array([math.erf(value) for value in (x / math.sqrt(2)).reshape(-1).tolist()], x.dtype).reshape(x.shape)
    weighted: NDArray[Any] = x * (1 + erf) / 2
    return weighted


def _gelu_tanh(x: NDArray[Any]) -> NDArray[Any]:
    weighted: NDArray[Any] = x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2
    return weighted


def _relu(x: NDArray[Any]) -> NDArray[Any]:
    positive: NDArray[Any] = np.maximum(x, 0)
    return positive


_MEANING: Mapping[Activation, Callable[[NDArray[Any]], NDArray[Any]]] = {
    "silu": lambda x: x * _sigmoid(x),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": _relu,
    "sigmoid": _sigmoid,
}
