"""A proposer with what the speculator knows of it."""

from __future__ import annotations

from optimc_runtime.speculate.calibration import Calibration
from optimc_runtime.speculate.controller import Attention
from optimc_runtime.speculate.proposal import Proposer
from optimc_runtime.speculate.tree import ProposerName
from optimc_runtime.stats import ProposerStats

FIRST_DEPTH, SHALLOWEST = 8, 4
"""Tokens asked of a proposer at first, and at least."""
LIKELY, UNLIKELY = 0.6, 0.1
"""Estimates of the deepest guess above and below which a proposer is asked for twice or half as many tokens."""
SMOOTHING = 0.1
"""Share of the newest value in running means."""
OUTLIER = 3.0
"""Times what asking is believed to take that a single time can count for: a text's first indexing, and what else the
machine does, are no part of what a guess costs."""


class AskedProposer:
    """Who is asked, whether, how deep, what its word is worth, and what came of it so far."""

    def __init__(self, proposer: Proposer, *, is_cheap: bool) -> None:
        self.proposer = proposer
        self.name: ProposerName = proposer.name
        self.is_cheap = is_cheap
        """Asking costs so little that it is not weighed beforehand."""
        self.calibration = Calibration()
        self.attention = Attention()
        self.depth = SHALLOWEST if proposer.name == "draft" else FIRST_DEPTH  # each step deeper costs a draft a step
        self.usual: list[float] = []
        """Running mean of its estimates, best first."""
        self.pays_until = 0
        """The step before which asking is taken to be worth it, in steps of `paying_shape`."""
        self.paying_shape = (0, 0, 0)
        """Sequences asked for, sequences, and rows of others."""
        self.drafted = self.accepted = self.trees = 0

    def adapt_depth(self, deepest: float, most: int) -> None:
        """Ask for deeper guesses while the deepest, of estimate `deepest`, are believed in, for fewer if they are
        not."""
        if deepest > LIKELY:
            self.depth = min(2 * self.depth, most)
        elif deepest < UNLIKELY:
            self.depth = max(min(SHALLOWEST, most), self.depth // 2)

    def take_time(self, seconds: float) -> None:
        """Asking for one sequence has just taken that long."""
        if not self.proposer.times_itself:
            believed_s = self.proposer.cost_s
            self.proposer.cost_s += SMOOTHING * (min(seconds, OUTLIER * believed_s) - believed_s)

    def take_usual(self, estimates: list[float]) -> None:
        """Bring the running means of its estimates up to date, rank by rank."""
        usual = self.usual
        for rank, value in enumerate(estimates):
            if rank < len(usual):
                usual[rank] += SMOOTHING * (value - usual[rank])
            else:
                usual.append(value)

    def stats(self) -> ProposerStats:
        """Return its totals."""
        return ProposerStats(self.drafted, self.accepted, self.trees)
