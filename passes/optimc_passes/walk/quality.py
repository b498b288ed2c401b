"""How far changed weights move a model's predictions, measured in float32 without ever holding the whole model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from optimc_passes.checkpoint import Checkpoint
from optimc_passes.walk.activations import Activations
from optimc_passes.walk.attention_function import AttentionHook
from optimc_passes.walk.budget import Budget
from optimc_passes.weights import Weight


class QualityProbe:
    """The original model's predictions on some windows, to hold others against."""

    def __init__(
        self, checkpoint: Checkpoint, windows: NDArray[np.int32], *, scratch: Path | None, budget: Budget
    ) -> None:
        raise NotImplementedError

    def measure(
        self,
        weights: Mapping[str, Weight],
        *,
        hook: AttentionHook | None = None,
        start_layer: int = 0,
        start: Activations | None = None,
    ) -> tuple[float, float]:
        """Return perplexity, and KL divergence from the original in nats per token."""
        raise NotImplementedError
