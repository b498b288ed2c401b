"""Which of those that wait is admitted first.

Waiting counts for every request, as much for one as for another, so who comes before whom never changes while both
wait: a request has a rank, and the queue is sorted by it. Nobody starves, since those that come late enough rank behind
whoever waits, whatever they are.
"""

from __future__ import annotations

from typing import Literal

from optimc_runtime.sequence import Sequence

PolicyName = Literal["fcfs", "shortest-prompt", "priority"]
"""By arrival; by length of the prompt; by the requests' priority, lower first."""

TOKENS_PER_S = 200
"""Policy "shortest-prompt": a second of waiting counts as much as a prompt shorter by so many tokens."""

Rank = tuple[bool, float, int]
"""Lower is sooner."""


def rank(sequence: Sequence, policy: PolicyName, ageing_s: float) -> Rank:
    """Return where a waiting sequence stands. Preempted ones stand before all others, by age: they were admitted
    before, and whoever reads their answers sees them stand still."""
    if sequence.num_preemptions:
        return (False, 0.0, sequence.order)
    if policy == "priority":
        return (True, sequence.arrived_s + ageing_s * sequence.priority, sequence.order)
    if policy == "shortest-prompt":
        return (True, sequence.arrived_s + sequence.num_prompt / TOKENS_PER_S, sequence.order)
    return (True, 0.0, sequence.order)
