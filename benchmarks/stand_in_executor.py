"""An executor without a model: it takes a step's time and returns logits made beforehand."""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from optimc.errors import EngineError
from optimc_runtime.executor.base import DraftCandidates, KvPoolInfo, StepPlan, StepResult
from optimc_runtime.sequence import Sequence
from optimc_runtime.speculate.tree import DraftTree, Verified, tree_shape

KINDS_OF_ROWS = 61
"""Rows of logits to choose from: a prime, so that no batch sees the same ones every few steps."""


class StandInExecutor:
    """Answers every step with rows of `logits_pool` [KINDS_OF_ROWS + R, V], others in each step.

    With `sweep_bytes` a step first reads that much memory with the GIL released, as a model reads its weights: whoever
    wants the GIL gets it, and what Python touches next is no longer in the caches.
    """

    def __init__(self, pool: KvPoolInfo, logits_pool: NDArray[np.float32], sweep_bytes: int = 0) -> None:
        self.pool = pool
        self.heads = None
        self.execute_s = 0.0
        """Total time spent in `execute`."""
        self._logits = logits_pool
        self._likeliest: list[int] = logits_pool.argmax(axis=1).tolist()
        self._weights = np.ones(sweep_bytes // 8)
        self._out = np.empty_like(logits_pool[KINDS_OF_ROWS:])
        self._step = 0

    def likeliest_next(self, count: int) -> list[int]:
        """Return the likeliest tokens of the first rows of the next step."""
        first = (self._step + 1) % KINDS_OF_ROWS
        return self._likeliest[first : first + count]

    def execute(self, plan: StepPlan) -> StepResult:
        """Return R rows of logits."""
        started_s = time.perf_counter()
        if len(self._weights):
            np.add.reduce(self._weights)
        self._step += 1
        first = self._step % KINDS_OF_ROWS
        count = len(plan.logits_rows)
        np.copyto(self._out[:count], self._logits[first : first + count])  # as fresh in the caches as a real one's
        result = StepResult(self._out[:count])
        self.execute_s += time.perf_counter() - started_s
        return result

    def draft(self, *_: object) -> DraftCandidates:
        """Raise EngineError: there are no heads."""
        raise EngineError("an executor without a model has no heads")

    def move(self, src_slots: NDArray[np.int64], dst_slots: NDArray[np.int64]) -> None:
        """Do nothing: there is no pool."""

    def close(self) -> None:
        """Do nothing."""


class StandInSpeculator:
    """Guesses trees of three nodes, of which greedy sampling of a StandInExecutor's logits accepts the last two."""

    def __init__(self, executor: StandInExecutor) -> None:
        self.is_idle = False
        self.typical = (0.0, 0.0)
        self.wants_hidden = False
        self._executor = executor
        self._shape = tree_shape((-1, -1, 1))

    def draft(self, sequences: list[Sequence], *_: object) -> list[DraftTree | None]:
        """Guess for every sequence."""
        likeliest = self._executor.likeliest_next(4 * len(sequences))
        return [
            DraftTree(self._shape, [root ^ 1, root, likeliest[place + 2]], "ngram", [0.0, 1.0, 1.0])
            for place, root in list(enumerate(likeliest))[::4]
        ]

    def keep(self, *_: object) -> None:
        """Not called."""

    def observe(self, verified: list[Verified], *_: object) -> None:
        """Check that measuring is worth anything."""
        assert all(each.path == [1, 2] for each in verified if each.tree.shape is self._shape)

    def plain_step(self, *_: object) -> None:
        """Nothing is learned."""

    def forget(self, sequence: Sequence) -> None:
        """Nothing is kept."""

    def stats(self) -> None:
        """There are none."""

    def close(self) -> None:
        """Do nothing."""


def make_logits(num_rows: int, vocab_size: int) -> NDArray[np.float32]:
    """Return [KINDS_OF_ROWS + num_rows, V] logits as peaked as a trained model's: few tokens hold nearly everything."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((KINDS_OF_ROWS + num_rows, vocab_size), np.float32) * np.float32(2)
    favoured = rng.random(logits.shape) < 3e-4
    logits[favoured] += rng.uniform(4, 13, favoured.sum())
    return logits
