"""What guesses have brought, counted."""

from __future__ import annotations


class Tally:
    """Running totals over all proposers."""

    def __init__(self) -> None:
        self.sequence_steps = 0
        """Decoding sequences times steps."""
        self.emitted = 0
        """Tokens those steps emitted."""
        self.draft_s = 0.0
        """Time spent guessing."""
        self.position_drafted: list[int] = []
        self.position_accepted: list[int] = []

    def add_step(self, num_sequences: int, num_emitted: int) -> None:
        """Count a step."""
        self.sequence_steps += num_sequences
        self.emitted += num_emitted

    def add_path(self, parents: tuple[int, ...], path: list[int]) -> None:
        """Count by distance what was tried of a tree, and what of it was emitted: `path`, from the root down."""
        drafted, accepted = self.position_drafted, self.position_accepted
        parent = -1
        for depth in range(len(path) + 1):
            if parent not in parents:
                return
            if depth == len(drafted):
                drafted.append(0)
                accepted.append(0)
            drafted[depth] += 1
            if depth < len(path):
                accepted[depth] += 1
                parent = path[depth]
