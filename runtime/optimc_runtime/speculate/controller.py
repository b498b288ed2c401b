"""Whether guessing pays, and how much of it: an objective, and who is asked at all."""

from __future__ import annotations

from collections.abc import Sequence

from optimc_runtime.speculate.cost_model import CostModel

STRIKES = 8
"""Vain proposals in a row after which a proposer is not asked for a while."""
SHORTEST_SLEEP, LONGEST_SLEEP = 32, 2048
"""Steps a proposer is not asked."""
SLEEP_SHARE = 1e-3
"""Asking in vain may take this share of the time: a cheap proposer need not sleep long."""
PROBE_NODES = 2
"""Nodes verified of the first proposal after a sleep, whatever is thought of them."""
LEDGER_MEMORY = 0.8
"""What a proposer's balance keeps with every step that verified something of it."""


def choose(
    estimates: Sequence[float],
    num_sequences: int,
    other_rows: int,
    cost: CostModel,
    draft_s: float,
    least_gain: float = 0.0,
) -> int:
    """Return how many of the nodes to verify, `estimates` falling: the n with the most expected tokens per second,
    (B + sum of the first n) / (cost(B + other + n) + draft_s). Any n but 0 must be better than 0 by `least_gain`."""
    seconds = cost.by_rows(num_sequences, num_sequences + other_rows, len(estimates))
    tokens = float(num_sequences)
    best, best_rate = 0, (1 + least_gain) * tokens / (seconds[0] + draft_s)
    for n, estimate in enumerate(estimates, 1):
        tokens += estimate
        rate = tokens / (seconds[n] + draft_s)
        if rate > best_rate:
            best, best_rate = n, rate
    return best


class Attention:
    """Whether one proposer is asked. After STRIKES proposals in a row that were not worth their cost it sleeps, twice
    as long each time, until verifying has paid again."""

    def __init__(self) -> None:
        self.wakes_at = 0
        """The step from which the proposer is asked."""
        self.is_probing = False
        """It has just woken up: its next proposal is tried whatever the estimates say."""
        self._strikes = 0
        self._sleep = SHORTEST_SLEEP
        self._balance = 0.0

    def strike(self, step: int, cost_s: float, step_s: float) -> None:
        """What was proposed in `step` was not worth it; asking took `cost_s` of a step's `step_s`."""
        self._strikes += 1
        if self._strikes >= STRIKES:
            longest = max(SHORTEST_SLEEP, int(cost_s / (SLEEP_SHARE * step_s)))
            self.wakes_at = step + 1 + min(self._sleep, longest)
            self._sleep = min(2 * self._sleep, LONGEST_SLEEP)
            self._strikes = STRIKES - 1  # once awake, one vain proposal is enough
            self.is_probing = True

    def expect_gain(self) -> None:
        """What was proposed looks worth verifying."""
        if not self.is_probing:
            self._strikes = 0

    def settle(self, gained_s: float) -> None:
        """A step that verified something gained that much against a plain one."""
        self._balance = LEDGER_MEMORY * self._balance + gained_s
        self.is_probing = False
        if self._balance > 0:
            self._strikes = 0
            self._sleep = SHORTEST_SLEEP
