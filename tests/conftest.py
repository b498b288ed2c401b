"""Guesses with a known fate, for engines whose plain answers are known."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from optimc_runtime.sequence import Sequence
from optimc_runtime.speculate.tree import DraftTree, TreeShape, Verified, tree_shape
from optimc_runtime.stats import SpeculationStats

SHAPES = {
    "chain of 1": (-1,),
    "chain of 4": (-1, 0, 1, 2),
    "2x2": (-1, -1, 0, 0, 1, 1),
    # As a policy prunes trees: wide near the root, and the deepest path is not the first one.
    "26 nodes": (-1, -1, -1, -1, 0, 0, 1, 1, 1, 2, 2, 3, 4, 4, 6, 6, 7, 8, 9, 12, 14, 14, 15, 17, 20, 20),
}


class ScriptedSpeculator:
    """Guesses what its `source` says; checks what it is told and remembers it."""

    def __init__(self, source: Callable[[Sequence], DraftTree | None], *, wants_hidden: bool = False) -> None:
        self.source = source
        self.is_idle = False
        self.typical = (0.0, 0.0)
        self.wants_hidden = wants_hidden
        self.calls: list[tuple[int, int, int, bool]] = []
        """(sequences, other rows, most nodes, chains only) of every `draft`."""
        self.verified: list[Verified] = []
        self.kept: list[tuple[tuple[Sequence, ...], np.ndarray]] = []
        self.plain_steps: list[tuple[int, int]] = []
        self.tree_steps: list[tuple[int, int]] = []
        self.forgotten: list[Sequence] = []
        self.closed = False

    def draft(self, sequences, other_rows, most_nodes, chains_only):
        assert sequences
        assert most_nodes > 0
        for sequence in sequences:
            assert sequence.num_tokens - sequence.num_computed == 1, "a decode knows one token more than is computed"
        self.calls.append((len(sequences), other_rows, most_nodes, chains_only))
        return [self.source(sequence) for sequence in sequences]

    def keep(self, sequences, hidden):
        assert self.wants_hidden
        assert len(sequences) == len(hidden)
        self.kept.append((sequences, hidden))

    def observe(self, verified, num_sequences, num_rows, execute_s):
        assert execute_s >= 0
        for each in verified:
            assert each.num_emitted >= 1
            assert [each.tree.shape.parents[node] for node in each.path] == [-1, *each.path][: len(each.path)]
        self.verified += verified
        self.tree_steps.append((num_sequences, num_rows))

    def plain_step(self, num_sequences, num_rows, execute_s):
        assert execute_s >= 0
        self.plain_steps.append((num_sequences, num_rows))

    def forget(self, sequence):
        self.forgotten.append(sequence)

    def stats(self):
        return SpeculationStats("scripted", True, {}, (), (), 0, 0, 0.0)

    def close(self):
        self.closed = True


class Guesser:
    """Trees of one shape whose first `right(n)` nodes along a deepest path are what plain decoding emits; the others
    are not. n counts the guesses made for the sequence; which of several deepest paths is right changes with it.

    `truth`: what plain decoding answers, by request id. None as `right`: nodes are drawn and may be right by chance.
    """

    def __init__(
        self,
        truth: dict[str, list[int]],
        parents: tuple[int, ...],
        vocab_size: int,
        right: Callable[[int], int] | None = None,
        seed: int = 0,
    ) -> None:
        self.truth = truth
        self.shape = tree_shape(parents)
        self.right = right
        self.vocab_size = vocab_size
        self.counts: dict[str, int] = {}
        self._rng = np.random.default_rng(seed)

    def __call__(self, sequence: Sequence) -> DraftTree:
        name = sequence.request_id
        count = self.counts[name] = self.counts.get(name, -1) + 1
        true = self.truth.get(name, [])[sequence.num_output :]
        path = self._path(count)
        right = len(path) if self.right is None else min(self.right(count), len(path))
        tokens: list[int] = []
        for node, parent in enumerate(self.shape.parents):
            depth = int(self.shape.depths[node + 1])
            follows = parent == -1 or parent in path[:right]
            if self.right is not None and node in path[:right] and depth <= len(true):
                tokens.append(true[depth - 1])
                continue
            taken = {tokens[other] for other in range(node) if self.shape.parents[other] == parent}
            if self.right is not None and follows and depth <= len(true):
                taken.add(true[depth - 1])
            token = int(self._rng.integers(self.vocab_size))
            while token in taken:
                token = (token + 1) % self.vocab_size
            tokens.append(token)
        return DraftTree(self.shape, tokens, "ngram", [0.5] * len(tokens))

    def _path(self, count: int) -> list[int]:
        deepest = np.flatnonzero(self.shape.depths == self.shape.depth) - 1
        node = int(deepest[count % len(deepest)])
        path = []
        while node >= 0:
            path.append(node)
            node = self.shape.parents[node]
        return path[::-1]


class Speculation:
    """What tests need to guess: `shapes` by name, `Speculator`, `Guesser`, and sources that `make`s by name."""

    shapes = SHAPES
    Speculator = ScriptedSpeculator
    Guesser = Guesser
    rights: dict[str, Callable[[int], int] | None] = {  # noqa: RUF012
        "random": None,
        "oracle": lambda _: 1000,
        "wrong": lambda _: 0,
        "mixed": lambda count: count % 4,
    }

    @staticmethod
    def shape(parents: tuple[int, ...]) -> TreeShape:
        return tree_shape(parents)

    @classmethod
    def make(cls, source: str, shape: str, truth: dict[str, list[int]], vocab_size: int, **options):
        guesser = Guesser(truth, cls.shapes[shape], vocab_size, cls.rights[source])
        return ScriptedSpeculator(guesser, **options)


@pytest.fixture(scope="session")
def speculation() -> type[Speculation]:
    return Speculation
