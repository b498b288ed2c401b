"""What one sequence is offered in one step, and what of it is left after cuts."""

from __future__ import annotations

from functools import lru_cache

from optimc_runtime.speculate.asked_proposer import AskedProposer
from optimc_runtime.speculate.proposal import Proposal
from optimc_runtime.speculate.tree import DraftTree, chain, first_path, is_chain, parents_among

COMPARED_NODES = 4
"""Nodes by which two proposals for one sequence are compared."""


class Offer:
    """What one sequence was offered: the nodes by falling estimate, and their confidences."""

    __slots__ = ("asked", "confidences", "estimates", "parents", "tokens")

    def __init__(self, asked: AskedProposer, proposal: Proposal, estimates: list[float]) -> None:
        self.asked = asked
        self.parents, self.tokens, self.confidences = proposal
        self.estimates = estimates
        if not is_chain(self.parents):
            self._sort()

    @property
    def promise(self) -> float:
        """Expected tokens of the nodes by which proposals are compared."""
        return sum(self.estimates[:COMPARED_NODES])

    @property
    def deepest(self) -> float:
        """The estimate of the last node; 0 if it was not worth one."""
        estimates = self.estimates
        return estimates[-1] if estimates and len(estimates) == len(self.tokens) else 0.0

    def _sort(self) -> None:
        """Order nodes by estimate. Parents stay before children: none is less likely than its child."""
        order = sorted(range(len(self.parents)), key=self.estimates.__getitem__, reverse=True)
        self.parents = _parents_in_order(self.parents, tuple(order))
        self.tokens = [self.tokens[node] for node in order]
        self.confidences = [self.confidences[node] for node in order]
        self.estimates = [self.estimates[node] for node in order]


@lru_cache(maxsize=4096)
def _parents_in_order(parents: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    """`parents_among`, remembered: a plan's tree is put in the same few orders again and again."""
    return parents_among(parents, order)


def confidences_of(tree: DraftTree, offer: Offer) -> list[float]:
    """Return the confidences of a tree's nodes, whatever the scheduler left of the draft it comes from."""
    parents = tree.shape.parents
    count = len(parents)
    if parents == offer.parents[:count] and tree.tokens == offer.tokens[:count]:
        return offer.confidences[:count]
    known = {
        (parent, token): node for node, (parent, token) in enumerate(zip(offer.parents, offer.tokens, strict=True))
    }
    nodes: list[int] = []
    for parent, token in zip(parents, tree.tokens, strict=True):
        nodes.append(known[nodes[parent] if parent >= 0 else -1, token])
    return [offer.confidences[node] for node in nodes]


def as_chain(proposal: Proposal) -> Proposal:
    """Return the chain of first children: what a step without a mask can verify."""
    if is_chain(proposal.parents):
        return proposal
    path = first_path(proposal.parents)
    return Proposal(
        chain(len(path)),
        [proposal.tokens[node] for node in path],
        [proposal.confidences[node] for node in path],
    )
