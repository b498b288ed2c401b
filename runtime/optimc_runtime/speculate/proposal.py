"""What a proposer is, and what it answers."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from optimc_runtime.sequence import Sequence
from optimc_runtime.speculate.tree import ProposerName


class Proposal(NamedTuple):
    """Guesses for one sequence, as a tree below its last token."""

    parents: tuple[int, ...]
    """[n] each node's parent, an index into the nodes before it; -1: the root."""
    tokens: list[int]
    """[n] siblings have different ones."""
    confidences: list[float]
    """[n] how likely the proposer thinks a node is accepted once its parent is."""


class Proposer(Protocol):
    """Guesses how sequences go on. Never asked from two threads; may raise, and is then not asked again."""

    name: ProposerName
    cost_s: float
    """Seconds that one `propose` for one sequence takes, as measured lately."""
    times_itself: bool
    """Whether it keeps `cost_s` itself; else whoever asks does."""

    def propose(self, sequences: list[Sequence], most_depth: int) -> list[Proposal | None]:
        """Return a guess for each sequence, no deeper than `most_depth`; None where there is none."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept of a sequence that has ended."""
        ...

    def close(self) -> None:
        """Release what is held."""
        ...
