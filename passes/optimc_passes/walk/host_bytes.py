"""How much memory a walk needs, told from shapes before anything is read."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from optimc_passes.artifact import Artifact
from optimc_passes.quantize.linears import linear_weights

_LAYER = re.compile(r".*\blayers\.(\d+)\.")
_MOMENTS_AT_ONCE = 7
"""The second moment, its copy in another order, what factorizing takes, the factor, and the order for sweeps."""
_WEIGHTS_AT_ONCE = 12
"""Float32 copies of the stacked weights while they are rounded: targets, steps, gradients, products."""
_WINDOWS_AT_ONCE = 2
"""Windows of activations in memory where all of them do not fit."""


@dataclass(frozen=True)
class HostBytes:
    """The parts of what a walk needs beyond what the process holds before, in bytes."""

    layer: int
    """The largest decoder layer in float32, as it was and as it becomes."""
    moments: int
    """The largest second moment with its factor, and the weights being rounded."""
    activations: int
    """Two windows at every place of a layer; where all windows fit they are kept in memory instead."""
    ends: int
    """The embedding's rows in use, or the head."""

    @property
    def total(self) -> int:
        """All together."""
        return self.layer + self.moments + self.activations + self.ends

    def __str__(self) -> str:
        parts = {
            "layer": self.layer,
            "second moments": self.moments,
            "activations": self.activations,
            "embedding and head": self.ends,
        }
        return ", ".join(f"{name} {nbytes / (1 << 30):.2f}" for name, nbytes in parts.items())


def walk_host_bytes(artifact: Artifact, *, streams: int = 1) -> HostBytes:
    """Return what a walk that solves for weights needs at most; `streams` of activations side by side."""
    layers: dict[str, int] = {}
    for name, weight in artifact.weights.items():
        found = _LAYER.match(name)
        if found is not None:
            layers[found[1]] = layers.get(found[1], 0) + 4 * int(np.prod(weight.shape))
    linears = linear_weights(artifact.checkpoint.config)
    inside = [linear for linear in linears if _LAYER.match(linear.name)]
    widest = max((linear.shape[1] for linear in inside), default=0)
    # Siblings, which read one value, are stacked.
    by_input: dict[tuple[str, int], int] = {}
    for linear in inside:
        half = linear.layer.rpartition(".")[0]
        by_input[half, linear.shape[1]] = by_input.get((half, linear.shape[1]), 0) + linear.shape[0] * linear.shape[1]
    stacked = _WEIGHTS_AT_ONCE * 4 * max(by_input.values(), default=0)
    longest = max((len(row) for row in artifact.calibration.tokens), default=0) if artifact.calibration else 0
    width = max((linear.shape[0] for linear in inside), default=0)
    heads = [4 * linear.shape[0] * linear.shape[1] for linear in linears if linear.is_head]
    return HostBytes(
        layer=2 * max(layers.values(), default=0),
        moments=_MOMENTS_AT_ONCE * 4 * widest * widest + stacked,
        activations=_WINDOWS_AT_ONCE * streams * 4 * longest * max(width, widest) * 4,
        ends=max(heads, default=0),
    )
