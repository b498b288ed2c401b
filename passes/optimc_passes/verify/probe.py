"""Tokens on which graphs are compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Probe:
    """Tokens at positions 0 .. T-1 of one sequence."""

    tokens: NDArray[np.int64]
    """[T]."""
    rows: NDArray[np.int64] | None = None
    """Tokens whose logits are asked for, [R]; every token's, in order, if None."""

    @classmethod
    def of_vocabulary(cls, vocab_size: int, length: int = 32, seed: int = 0) -> Probe:
        """Draw tokens evenly from the vocabulary."""
        return cls(np.random.default_rng(seed).integers(0, vocab_size, length, dtype=np.int64))

    def with_scattered_rows(self) -> Probe:
        """Return the probe with every other row, the last one first.

        R is not T then, and no row lies where its token does: a graph that takes one for the other is found out. The
        last token sees all the others.
        """
        return Probe(self.tokens, np.arange(len(self.tokens) - 1, -1, -2, dtype=np.int64))

    def inputs(self) -> dict[str, NDArray[Any]]:
        """Return the graph's inputs by name."""
        positions = np.arange(len(self.tokens), dtype=np.int64)
        rows = positions if self.rows is None else self.rows
        return {"input_ids": self.tokens, "position_ids": positions, "logits_rows": rows}
