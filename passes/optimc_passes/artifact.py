"""What flows through the passes: a value, never changed in place."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from optimc_passes.checkpoint import Checkpoint
from optimc_passes.choices import Choices
from optimc_passes.weights import WeightStore

if TYPE_CHECKING:
    import onnx_ir as ir

    from optimc_passes.calibrate import Calibration
    from optimc_passes.heads.heads import Heads


@dataclass(frozen=True)
class Artifact:
    """The state of a build between two passes."""

    key: str
    """SHA-256 over everything this state was computed from."""
    checkpoint: Checkpoint
    """The original; its weights are the reference that passes are measured against."""
    weights: WeightStore
    """The weights as they are now."""
    calibration: Calibration | None = None
    choices: Choices = field(default_factory=Choices)
    """What passes decided for those after them."""
    graph: ir.Model | None = None
    """None in the weight stage. In the graph stage its initializers read `weights` when looked at."""
    heads: Heads | None = None
    """Medusa heads, added to a finished graph; None without any."""

    @classmethod
    def start(cls, checkpoint: Checkpoint, calibration: Calibration | None = None) -> Artifact:
        """Return the state before the first pass.

        The key is the checkpoint's digest alone: calibration counts only for passes that use it.
        """
        return cls(checkpoint.digest, checkpoint, checkpoint.weights, calibration)

    def evolve(self, **changes: Any) -> Artifact:
        """Return a copy with some fields changed."""
        return replace(self, **changes)


def derive_key(*parts: Any) -> str:
    """Return the SHA-256 hex digest of JSON values, independent of the order of mapping keys."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
