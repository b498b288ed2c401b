"""Guessed continuations as trees: their shapes, what became of one, and who the step loop asks for them.

A tree hangs below a sequence's last known token, the root, which every step computes anyway. A step computes root and
nodes as the queries of one sequence: query 0 is the root, query i + 1 is node i. A node stands at the position of the
root plus its depth and sees the context, the root, its ancestors and itself.
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from optimc_runtime.sequence import Sequence

if TYPE_CHECKING:
    from optimc_runtime.stats import SpeculationStats

ProposerName = Literal["medusa", "ngram", "draft"]

MAX_KEPT_SHAPES = 4096
"""Shapes of trees remembered; a proposer uses a handful, cut ones are more."""


_CHAINS = tuple(tuple(range(-1, length - 1)) for length in range(65))


def chain(length: int) -> tuple[int, ...]:
    """Return the parents of a chain, the same object for equal lengths up to 64."""
    return _CHAINS[length] if length < len(_CHAINS) else tuple(range(-1, length - 1))


def is_chain(parents: tuple[int, ...]) -> bool:
    """Return whether every node hangs below the one before it."""
    known = chain(len(parents))
    return parents is known or parents == known


class TreeShape:
    """Where nodes hang. parents[i] is the node's parent, an index into the nodes before it; -1: the root. Immutable;
    made by `tree_shape`, which returns the same object for equal parents while it remembers it."""

    __slots__ = ("depth", "depths", "is_chain", "mask", "num_nodes", "parents", "query_parents")

    def __init__(self, parents: tuple[int, ...]) -> None:
        assert all(-1 <= parent < node for node, parent in enumerate(parents)), "a parent stands behind its child"
        self.parents = parents
        self.num_nodes = len(parents)
        self.query_parents: NDArray[np.int32] = np.array([-1, *(parent + 1 for parent in parents)], np.int32)
        """[n+1] in query indices (root = 0); the root's is -1."""
        self.depths: NDArray[np.int64] = np.zeros(len(parents) + 1, np.int64)
        """[n+1] the root's 0 first."""
        self.mask: NDArray[np.bool_] = np.eye(len(parents) + 1, dtype=np.bool_)
        """[n+1, n+1] query sees query: itself, its ancestors, the root."""
        for query in range(1, len(parents) + 1):
            parent = self.query_parents[query]
            self.depths[query] = self.depths[parent] + 1
            self.mask[query] |= self.mask[parent]
        self.depth = int(self.depths.max())
        """Of the deepest node; 0 without nodes."""
        self.is_chain = is_chain(parents)
        """Causal: needs no mask, and what is accepted never moves."""
        for array in (self.query_parents, self.depths, self.mask):
            array.flags.writeable = False


_shapes: dict[tuple[int, ...], TreeShape] = {}


def tree_shape(parents: tuple[int, ...]) -> TreeShape:
    """Return the shape, the same object for equal parents while it is among the last ones made.

    AssertionError unless -1 <= parents[i] < i.
    """
    shape = _shapes.get(parents)
    if shape is None:
        shape = TreeShape(parents)
        if len(_shapes) >= MAX_KEPT_SHAPES:
            _shapes.clear()
        _shapes[parents] = shape
    return shape


def first_path(parents: tuple[int, ...]) -> list[int]:
    """Return the nodes of the path that takes the first child everywhere."""
    path: list[int] = []
    last = -1
    for node, parent in enumerate(parents):
        if parent == last:
            path.append(node)
            last = node
    return path


def parents_among(parents: tuple[int, ...], nodes: Ordered[int]) -> tuple[int, ...]:
    """Return the parents of the tree of `nodes`, in their order: each one's parent is among them, before it."""
    place = {node: new for new, node in enumerate(nodes)} | {-1: -1}
    return tuple([place[parents[node]] for node in nodes])


class DraftTree(NamedTuple):
    """Guesses to verify after a sequence's last token. Siblings have different tokens; ids are in the vocabulary."""

    shape: TreeShape
    tokens: list[int]
    """[n]"""
    proposer: ProposerName
    estimates: list[float]
    """[n] believed probability that the node is accepted, its parents' included."""


class Verified(NamedTuple):
    """What became of one tree."""

    sequence: Sequence
    """May be finished by now."""
    tree: DraftTree
    """As it was verified: what the scheduler left of the proposal."""
    path: list[int]
    """Accepted nodes, from the root down."""
    num_emitted: int
    """Tokens delivered, after cuts by stops and limits: at most one more than the path is long."""


class Speculator(Protocol):
    """What the step loop knows of speculation: one object behind which proposers and policy live. Never raises (a
    proposer that fails is logged and switched off). Called from the engine's thread only, `stats` excepted."""

    is_idle: bool
    """Read every step: True = `draft` need not be called for this step."""
    typical: tuple[float, float]
    """(epsilon, delta) of typical acceptance; (0, 0): exact."""
    wants_hidden: bool
    """Whether `keep` is wanted after every step that sampled."""

    def draft(
        self, sequences: list[Sequence], other_rows: int, most_nodes: int, chains_only: bool
    ) -> list[DraftTree | None] | None:
        """Return trees for the decoding `sequences` of the coming step, in their order; None: none at all.

        The step has `other_rows` rows beside the sequences' own. A tree may have more nodes or depth than fit: the
        scheduler cuts it.
        """
        ...

    def keep(self, sequences: tuple[Sequence, ...], hidden: NDArray[np.float32]) -> None:
        """Take `hidden` [n, d] (a copy, yours to hold): of the row each sequence's newest token was sampled from."""
        ...

    def observe(self, verified: list[Verified], num_sequences: int, num_rows: int, execute_s: float) -> None:
        """Learn from a successful step that had trees: `num_sequences` decoded, the step had `num_rows` tokens,
        prefill included."""
        ...

    def plain_step(self, num_sequences: int, num_rows: int, execute_s: float) -> None:
        """Note a successful step without trees; counts towards probing again. Well under 1 us."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept of a sequence that ended. Preempted ones are not forgotten."""
        ...

    def stats(self) -> SpeculationStats:
        """Return a snapshot; from any thread."""
        ...

    def close(self) -> None:
        """Release what proposers hold."""
        ...
