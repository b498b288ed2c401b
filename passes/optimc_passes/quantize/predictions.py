"""A model's own predictions at some places of the calibration text, and how far others are from them.

Letters: n places, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from optimc_passes.walk.activations import Activations
from optimc_passes.walk.budget import Budget
from optimc_passes.walk.layered_model import Head, LayeredModel
from optimc_passes.weights import Weight

_ROWS = 64
"""Rows of logits in memory at a time."""


class Predictions:
    """What a model predicts at places spread evenly over windows, given the last layer's outputs."""

    def __init__(
        self,
        model: LayeredModel,
        weights: Mapping[str, Weight],
        end: Activations,
        wanted: int,
        *,
        budget: Budget,
        folder: Path | None,
    ) -> None:
        self._head = model.head(weights)
        step = max(end.tokens // wanted, 1)
        self._blocks = [
            (window, np.arange(start, min(start + step * _ROWS, length), step))
            for window, length in enumerate(end.lengths)
            for start in range(step - 1, length, step * _ROWS)
        ]
        lengths = [len(places) for _, places in self._blocks]
        self.count = sum(lengths)
        """How many predictions divergences are means over."""
        vocabulary = model.head_weight(weights).shape[0]
        # Kept, as every stream is held against them: computing them anew would cost as much as a stream's own.
        self._own = Activations(lengths, vocabulary, budget=budget, folder=folder)
        for block in range(len(self._blocks)):
            self._own.put(block, self._logarithms(self._head, end, block))

    def divergence(self, stream: Activations, head: Head | None = None) -> float:
        """Return the KL divergence of what a stream of last outputs predicts, by the model's head or by another."""
        total = 0.0
        for block in range(len(self._blocks)):
            log_p, log_q = self._own.tensor(block), self._logarithms(head or self._head, stream, block)
            total += max(float((log_p.exp() * (log_p - log_q)).sum(dtype=torch.float64)), 0.0)
        return total / max(self.count, 1)

    def _logarithms(self, head: Head, stream: Activations, block: int) -> torch.Tensor:
        """Return logarithms of probabilities [n, V] at a block's places."""
        window, places = self._blocks[block]
        hidden = np.ascontiguousarray(stream.window(window)[places])
        return torch.from_numpy(head.logits(hidden)).log_softmax(dim=1)
