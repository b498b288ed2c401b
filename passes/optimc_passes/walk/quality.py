"""How far changed weights move a model's predictions, measured in float32 without ever holding the whole model.

Letters: W windows of T tokens, V vocabulary. Row t of a window's logits predicts token t + 1: W * (T - 1) predictions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from optimc_passes.checkpoint import Checkpoint
from optimc_passes.walk.activations import Activations
from optimc_passes.walk.attention_function import AttentionHook
from optimc_passes.walk.budget import Budget
from optimc_passes.walk.layered_model import LayeredModel
from optimc_passes.weights import Weight

_ROWS = 64
"""Rows of logits in memory at a time, of both models."""


class QualityProbe:
    """The original model's predictions on some windows, to hold others against.

    What is kept of it are its final hidden states [W * T, hidden]; logits of both models are made from those, a few
    rows at a time.
    """

    def __init__(
        self, checkpoint: Checkpoint, windows: NDArray[np.int32], *, scratch: Path | None, budget: Budget
    ) -> None:
        assert windows.ndim == 2, windows.shape
        assert windows.shape[1] > 1, windows.shape
        self._original = checkpoint.weights
        self._windows = windows
        self._scratch, self._budget = scratch, budget
        self.model = LayeredModel(checkpoint.config)
        self.inputs = self._empty()
        """What enters layer 0 of the original model."""
        self.model.embed(self._original, list(windows), self.inputs)
        self._hidden = self._through_layers(self._original, 0, self.inputs)

    @property
    def predictions(self) -> int:
        """How many predictions the figures are means over."""
        return len(self._windows) * (len(self._windows[0]) - 1)

    def measure(
        self,
        weights: Mapping[str, Weight],
        *,
        hook: AttentionHook | None = None,
        start_layer: int = 0,
        start: Activations | None = None,
    ) -> tuple[float, float]:
        """Return perplexity, and KL(original || changed) in nats per token; both NaN where a logit is not finite.

        `hook` sees every layer's attention. A `start_layer` with what enters it, [T, hidden] per window, spares the
        layers before.
        """
        assert (start is None) == (start_layer == 0), "what enters the first layer is known"
        if start is None:
            start = self._empty()
            self.model.embed(weights, list(self._windows), start)
        before = self.model.attention_hook
        self.model.attention_hook = hook
        try:
            hidden = self._through_layers(weights, start_layer, start)
        finally:
            self.model.attention_hook = before
        return self._compare(weights, hidden)

    def _through_layers(self, weights: Mapping[str, Weight], first: int, start: Activations) -> Activations:
        """Return the output of the last layer, given the input of layer `first`, which is left as it is."""
        source, out = start, self._empty()
        for layer in range(first, self.model.num_layers):
            with self.model.loaded(layer, weights) as loaded:
                for index in range(len(self._windows)):
                    out.put(index, loaded.run(source.window(index)))
            source = out
        return source

    def _compare(self, weights: Mapping[str, Weight], hidden: Activations) -> tuple[float, float]:
        changed, original = self.model.head(weights), self.model.head(self._original)
        nll = kl = 0.0
        for index, tokens in enumerate(self._windows):
            ours, theirs = hidden.window(index), self._hidden.window(index)
            for begin in range(0, len(tokens) - 1, _ROWS):
                rows = slice(begin, min(begin + _ROWS, len(tokens) - 1))
                log_q = _log_softmax(changed.logits(ours[rows]))
                log_p = _log_softmax(original.logits(theirs[rows]))
                targets = torch.from_numpy(tokens[begin + 1 : rows.stop + 1].astype(np.int64))
                nll -= float(log_q.gather(1, targets[:, None]).sum(dtype=torch.float64))
                kl += float((log_p.exp() * (log_p - log_q)).sum(dim=1).sum(dtype=torch.float64))
        mean = nll / self.predictions
        return math.inf if mean > math.log(np.finfo(float).max) else math.exp(mean), kl / self.predictions

    def _empty(self) -> Activations:
        lengths = [self._windows.shape[1]] * len(self._windows)
        return Activations(lengths, self.model.hidden_size, budget=self._budget, folder=self._scratch)


def _log_softmax(logits: NDArray[np.float32]) -> torch.Tensor:
    # In float64: a KL of a few thousandths is a sum over V of terms that nearly cancel.
    return torch.from_numpy(logits).double().log_softmax(dim=1)
