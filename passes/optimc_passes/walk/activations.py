"""Activations of all calibration tokens at one place of a model, in memory or in a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from optimc_passes.walk.budget import Budget


class Activations:
    """float32 [tokens, width], kept as the rows of one window after another."""

    def __init__(self, lengths: Sequence[int], width: int, *, budget: Budget, folder: Path | None) -> None:
        self.lengths = tuple(lengths)
        """Tokens of each window."""
        self.width = width
        raise NotImplementedError

    def window(self, index: int) -> NDArray[np.float32]:
        """Return the rows [T, width] of a window."""
        raise NotImplementedError

    def put(self, index: int, rows: NDArray[np.float32]) -> None:
        """Store the rows [T, width] of a window."""
        raise NotImplementedError

    def save(self, path: Path) -> None:
        """Write everything to a file."""
        raise NotImplementedError

    @classmethod
    def load(
        cls, path: Path, lengths: Sequence[int], width: int, *, budget: Budget, folder: Path | None
    ) -> Activations:
        """Return what `save` wrote."""
        raise NotImplementedError


def second_moment(x: Activations, other: Activations | None = None) -> NDArray[np.float32]:
    """Return the sum over all tokens of x^T x [C, C], or of x^T other, float32, windows in their order."""
    raise NotImplementedError
