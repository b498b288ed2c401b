"""Training batches: runs of consecutive positions, so that a hidden state serves as target of several heads.

Letters: S segments of a batch, L positions of a segment, K heads, d hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from optimc_passes.heads.samples import Samples

SEGMENT = 16


class Batch(NamedTuple):
    """What one training step reads."""

    hidden: Tensor
    """float32 [S, L, d] of the roots."""
    roots: Tensor
    """int64 [S, L] tokens sampled from them."""
    later: Tensor
    """float32 [S, L + K - 1, d] hidden states after the first root: those from 1 on, 2 on, ..., are what head 1, 2, ...
    is to foresee."""
    labels: Tensor
    """int64 [S, L + K - 1] tokens sampled from them; -1 beyond the end of a sample."""


class Segments:
    """The training samples in segments, and the order they are gone through in."""

    def __init__(self, samples: Samples, chosen: Sequence[int], num_heads: int, seed: int) -> None:
        self._samples, self._num_heads, self._seed = samples, num_heads, seed
        starts, ends = [], []
        for index in chosen:
            rows = samples.rows(index)
            first = np.arange(rows.start, rows.stop - 1, SEGMENT)
            starts.append(first)
            ends.append(np.full(len(first), rows.stop))
        empty = np.zeros(0, np.int64)
        self._starts = np.concatenate([empty, *starts]).astype(np.int64)
        self._ends = np.concatenate([empty, *ends]).astype(np.int64)
        self.positions = int(np.minimum(self._ends - 1 - self._starts, SEGMENT).sum())
        """Positions that have something to foresee."""

    def __len__(self) -> int:
        return len(self._starts)

    def steps(self, per_step: int, first: int, total: int) -> Iterator[Batch]:
        """Yield the batches of steps `first` .. `total`, each of `per_step` segments; every epoch has its own order."""
        per_epoch = max(1, len(self) // per_step)
        order: NDArray[np.int64] | None = None
        for step in range(first, total):
            epoch, place = divmod(step, per_epoch)
            if order is None or place == 0:
                order = np.random.default_rng([self._seed, epoch]).permutation(len(self))
            # In order of place, so that pages of the file are read once.
            yield self._batch(np.sort(order[place * per_step : (place + 1) * per_step]))

    def _batch(self, numbers: NDArray[np.int64]) -> Batch:
        starts, ends = self._starts[numbers], self._ends[numbers]
        rows = starts[:, None] + np.arange(SEGMENT + self._num_heads)
        there = rows < ends[:, None]
        rows = np.where(there, rows, ends[:, None] - 1)
        hidden = torch.from_numpy(self._samples.hidden[rows].astype(np.float32))
        tokens = torch.from_numpy(self._samples.tokens[rows].astype(np.int64))
        labels = torch.where(torch.from_numpy(there), tokens, -1)
        return Batch(hidden[:, :SEGMENT], tokens[:, :SEGMENT], hidden[:, 1:], labels[:, 1:])
