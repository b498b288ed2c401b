"""Guesses of the plan's Medusa heads (2401.10774): from the hidden state of a token, the tokens after the next."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from optimc.plan.heads import HeadsInfo
from optimc_runtime.executor.base import Executor
from optimc_runtime.sequence import Sequence
from optimc_runtime.speculate.proposal import Proposal
from optimc_runtime.speculate.tree import ProposerName, parents_among

_PER_NAT = 16
"""Entries of a table of confidences per unit of log-probability: looking up is cheaper than interpolating."""
_LEAST = -16
_LAST = -_LEAST * _PER_NAT
"""The last entry; less likely guesses share it."""


class MedusaProposer:
    """Proposes the plan's tree of head k's likeliest tokens at depth k, for sequences whose hidden state was kept."""

    name: ProposerName = "medusa"
    times_itself = False

    def __init__(self, executor: Executor, heads: HeadsInfo, max_nodes: int) -> None:
        self.cost_s = 2e-4
        self._executor = executor
        self._kept: dict[int, tuple[int, NDArray[np.float32]]] = {}
        """By sequence order: its length then, and the hidden state [1, d] its last token was sampled from."""
        self._nodes = _Nodes(heads, max_nodes)

    def keep(self, sequences: tuple[Sequence, ...], hidden: NDArray[np.float32]) -> None:
        """Take the hidden states [n, d] of the sequences' newest tokens."""
        if len(sequences) == 1:
            self._kept[sequences[0].order] = (sequences[0].num_tokens, hidden)
            return
        for index, sequence in enumerate(sequences):
            self._kept[sequence.order] = (sequence.num_tokens, hidden[index : index + 1])

    def propose(self, sequences: list[Sequence], most_depth: int) -> list[Proposal | None]:
        """Return the tree for each sequence whose last token's hidden state is known."""
        places: list[int] = []
        rows: list[NDArray[np.float32]] = []
        tokens: list[NDArray[np.int64]] = []
        for place, sequence in enumerate(sequences):
            kept = self._kept.get(sequence.order)
            if kept is not None and kept[0] == sequence.num_tokens:
                places.append(place)
                rows.append(kept[1])
                tokens.append(sequence.tokens[sequence.num_tokens - 1 : sequence.num_tokens])
        proposals: list[Proposal | None] = [None] * len(sequences)
        if not places or most_depth < 1:
            return proposals
        if len(rows) == 1:
            ids, logprobs = self._executor.draft(rows[0], tokens[0], self._nodes.top)
        else:
            ids, logprobs = self._executor.draft(np.concatenate(rows), np.concatenate(tokens), self._nodes.top)
        for place, of_heads, believed in zip(places, ids.tolist(), logprobs.tolist(), strict=True):
            proposals[place] = self._nodes.proposal(of_heads, believed, most_depth)
        return proposals

    def forget(self, sequence: Sequence) -> None:
        """Drop a sequence's hidden state."""
        self._kept.pop(sequence.order, None)

    def close(self) -> None:
        """Drop all hidden states."""
        self._kept.clear()


class _Nodes:
    """The plan's tree: which head and which rank each node takes, and what a log-probability is worth."""

    def __init__(self, heads: HeadsInfo, max_nodes: int) -> None:
        paths = heads.tree.nodes[:max_nodes]  # parents stand before children, so what is cut off is no parent
        index = {path: node for node, path in enumerate(paths)} | {(): -1}
        self.parents = tuple([index[path[:-1]] for path in paths])
        self.depths = [len(path) for path in paths]
        self.depth = max(self.depths, default=0)
        self.top = 1 + max([path[-1] for path in paths], default=0)
        tables = [_table(head.confidence) for head in heads.heads]
        self._sources = [(len(path) - 1, path[-1], tables[len(path) - 1]) for path in paths]
        """[n] each node's head, its rank there, and the head's table of confidences."""

    def proposal(self, candidates: list[list[int]], logprobs: list[list[float]], most_depth: int) -> Proposal | None:
        """Return the tree of candidates [K][top] down to `most_depth`, each with the probability that it is right once
        its parent is."""
        ids: list[int] = []
        confidences: list[float] = []
        for head, rank, table in self._sources:
            logprob = logprobs[head][rank]
            ids.append(candidates[head][rank])
            confidences.append(table[int(0.5 - _PER_NAT * logprob)] if logprob > _LEAST else table[_LAST])
        if self.depth <= most_depth:
            return Proposal(self.parents, ids, confidences) if ids else None
        kept = [node for node, depth in enumerate(self.depths) if depth <= most_depth]
        return Proposal(
            parents_among(self.parents, kept),
            [ids[node] for node in kept],
            [confidences[node] for node in kept],
        )


def _table(knots: tuple[tuple[float, float], ...]) -> list[float]:
    """Return the confidence of a guess by its log-probability, entry i at i _PER_NAT-ths below 0:
    between knots as they say, without any what the head itself believes."""
    logprobs = -np.arange(_LAST + 1) / _PER_NAT
    if knots:
        believed = np.interp(logprobs, [logprob for logprob, _ in knots], [confidence for _, confidence in knots])
    else:
        believed = np.exp(logprobs)
    confidences: list[float] = np.clip(believed, 0, 1).tolist()
    return confidences
