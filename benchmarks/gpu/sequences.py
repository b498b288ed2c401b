"""Steps as a scheduler forms them, without its policy: sequences by name, each with its blocks in the pool."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from optimc_runtime.executor.base import Executor, KvPoolInfo, StepPlan


class Sequences:
    """Hands out shuffled blocks from all over the pool and forms steps."""

    def __init__(self, pool: KvPoolInfo, seed: int = 0) -> None:
        self._size = pool.block_size
        most = min(pool.num_blocks, 1 << 16)
        spread = np.linspace(0, pool.num_blocks - 1, most).astype(np.int64)
        self._free = np.random.default_rng(seed).permutation(spread).tolist()
        self._blocks: dict[str, list[int]] = {}
        self.length: dict[str, int] = {}

    def step(self, work: Sequence[tuple[str, NDArray[np.int64]]], rows: Sequence[int] | None = None) -> StepPlan:
        """Return the step in which each (sequence, tokens) goes on where it stands; None asks for all logits."""
        positions, slots, contexts = [], [], []
        for name, tokens in work:
            start = self.length.get(name, 0)
            stop = self.length[name] = start + len(tokens)
            blocks = self._blocks.setdefault(name, [])
            while len(blocks) * self._size < stop:
                blocks.append(self._free.pop())
            index = np.arange(start, stop)
            positions.append(index)
            slots.append(np.array(blocks)[index // self._size] * self._size + index % self._size)
            contexts.append(start)
        table = np.zeros((len(work), max(len(self._blocks[name]) for name, _ in work)), np.int32)
        for row, (name, _) in enumerate(work):
            table[row, : len(self._blocks[name])] = self._blocks[name]
        counts = [len(tokens) for _, tokens in work]
        return StepPlan(
            tokens=np.concatenate([tokens for _, tokens in work]).astype(np.int64),
            positions=np.concatenate(positions).astype(np.int64),
            slots=np.concatenate(slots).astype(np.int64),
            query_start=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
            context_len=np.array(contexts, np.int32),
            block_table=table,
            logits_rows=np.arange(sum(counts)) if rows is None else np.array(rows, np.int64),
        )


def logits_by_chunks(
    executor: Executor, tokens: NDArray[np.int64], chunks: Sequence[int], seed: int = 0
) -> NDArray[np.float32]:
    """Return logits [T, V] of one sequence computed in chunks, the last of which repeats."""
    sequences, found, start = Sequences(executor.pool, seed), [], 0
    sizes = list(chunks)
    while start < len(tokens):
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        part = tokens[start : start + size]
        found.append(executor.execute(sequences.step([("a", part)])).logits.copy())
        start += len(part)
    return np.concatenate(found)
