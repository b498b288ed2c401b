"""How far one model's predictions are from another's, position by position, in float64.

Letters: T tokens of a window, V vocabulary. Row t of the logits [T, V] predicts token t + 1, so a window makes T - 1
predictions and its last row is not used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ROWS = 32
"""Rows brought to float64 at a time: 12 MiB at V = 49152, so that memory is bounded by the float32 logits."""


@dataclass(frozen=True, slots=True)
class WindowScore:
    """Sums over predictions; add them up over windows, then take means."""

    predictions: int = 0
    nll: float = 0.0
    """Negative log-likelihood of the actual next tokens, nats."""
    reference_nll: float = 0.0
    kl: float = 0.0
    """KL(reference || model), nats."""
    top1_matches: int = 0
    """Predictions where both have the same likeliest token."""

    def __add__(self, other: WindowScore) -> WindowScore:
        return WindowScore(
            self.predictions + other.predictions,
            self.nll + other.nll,
            self.reference_nll + other.reference_nll,
            self.kl + other.kl,
            self.top1_matches + other.top1_matches,
        )

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-likelihood; infinite where that exceeds float64."""
        return _exp(self.nll / self.predictions)

    @property
    def reference_perplexity(self) -> float:
        """The reference's perplexity."""
        return _exp(self.reference_nll / self.predictions)


def score_window(
    tokens: NDArray[np.integer], logits: NDArray[np.float32], reference: NDArray[np.float32] | None
) -> WindowScore:
    """Score one window: tokens [T], logits [T, V] of the model and, if there is one, of the reference.

    Without a reference only `predictions` and `nll` are filled. Raises ValueError on shapes that do not fit or logits
    that are not finite.
    """
    count = len(tokens) - 1
    for name, array in (("logits", logits), ("reference logits", reference)):
        if array is not None and (array.ndim != 2 or len(array) != len(tokens) or array.shape != logits.shape):
            raise ValueError(f"{name} have shape {list(array.shape)}, want [{len(tokens)}, {logits.shape[-1]}]")
    total = WindowScore()
    for start in range(0, count, ROWS):
        rows = slice(start, min(start + ROWS, count))
        targets = np.asarray(tokens[rows.start + 1 : rows.stop + 1], np.int64)
        own = _log_softmax(logits[rows], start)
        picked = np.arange(len(targets)), targets
        part = WindowScore(len(targets), nll=-float(own[picked].sum()))
        if reference is not None:
            other = _log_softmax(reference[rows], start)
            part += WindowScore(
                reference_nll=-float(other[picked].sum()),
                kl=float((np.exp(other) * (other - own)).sum()),
                top1_matches=int((own.argmax(-1) == other.argmax(-1)).sum()),
            )
        total += part
    return total


def _log_softmax(logits: NDArray[np.float32], first_row: int) -> NDArray[np.float64]:
    """[R, V] -> [R, V]; shifted by the row's maximum, so no exponential overflows."""
    finite = np.isfinite(logits).all(-1)
    if not finite.all():
        raise ValueError(f"logits at position {first_row + int(np.argmin(finite))} are not finite")
    shifted: NDArray[np.float64] = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(-1, keepdims=True))
    return shifted


def _exp(value: float) -> float:
    return math.exp(value) if value < 709 else math.inf
