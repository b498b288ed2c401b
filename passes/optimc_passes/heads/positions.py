"""Positions of sampled text as heads see them: what they read, and what came afterwards.

Letters: N positions, K heads, d hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from optimc_passes.heads.samples import Samples

NONE = -1
"""Where a sample has ended: no token came."""


class Positions:
    """Positions that are followed by at least one more token of their sample."""

    def __init__(
        self, samples: Samples, chosen: Sequence[int], embedding: NDArray[np.float32] | None, most: int | None = None
    ) -> None:
        """Take all positions of the `chosen` samples, or evenly spaced ones where there are more than `most`.

        `embedding` [V, d] is the table as the model reads it; None if nobody asks for it.
        """
        self._samples, self._embedding = samples, embedding
        rows = [np.arange(samples.starts[index], samples.starts[index + 1] - 1) for index in chosen]
        self.rows = np.concatenate([np.zeros(0, np.int64), *rows]).astype(np.int64)
        """[N] rows of the samples."""
        if most is not None and len(self.rows) > most:
            self.rows = self.rows[np.linspace(0, len(self.rows) - 1, most).astype(np.int64)]
        owner = np.searchsorted(samples.starts, self.rows, side="right") - 1
        self._ends = samples.starts[owner + 1]
        kinds = np.array(samples.kinds) if samples.kinds else np.zeros(0, "<U1")
        self.kinds: NDArray[np.str_] = kinds[owner]
        """[N] kind of text."""

    def __len__(self) -> int:
        return len(self.rows)

    def inputs(self, places: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
        """Return hidden states [n, d] and embeddings [n, d] of root tokens."""
        rows = self.rows[places]
        hidden = self._samples.hidden[rows].astype(np.float32)
        return hidden, None if self._embedding is None else self._embedding[self._samples.tokens[rows]]

    def roots(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the root tokens, [n]."""
        return self._samples.tokens[self.rows[places]].astype(np.int64)

    def next_tokens(self, places: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        """Return the `count` tokens that came after each root, [n, count]; NONE where the sample had ended."""
        wanted = self.rows[places][:, None] + np.arange(1, count + 1)
        there = wanted < self._ends[places][:, None]
        tokens: NDArray[np.int64] = np.where(there, self._samples.tokens[np.where(there, wanted, 0)], NONE)
        return tokens
