"""What a proposer's confidence is worth: corrected by what came of it."""

from __future__ import annotations

from optimc_runtime.speculate.proposal import Proposal
from optimc_runtime.speculate.tree import is_chain

SURE = 0.98
"""No guess is believed to be likelier, given its parent."""
LEAST = 0.1
"""What is less likely is not worth a thought, where a chain can end."""
BINS = 16
"""Classes of confidence that are corrected apart."""
DEPTHS = 4
"""Depths that are corrected apart; deeper nodes count as the last of them."""
BELIEF = 3.0
"""Expected hits that a proposer's own word is worth, against what was seen."""
SEQUENCE_BELIEF = 1.0
"""Expected hits that the record of all sequences is worth, against that of one of them."""
MEMORY = 0.995
"""What a class keeps of its record with every node."""
SEQUENCE_MEMORY = 0.9
"""What a sequence keeps of its record with every tree."""
FADING = 0.98
"""What a sequence keeps of its record whenever a guess of it is not verified."""


class _Record:
    """Hits against expectations, both fading; an estimate is multiplied with `factor`."""

    __slots__ = ("expected", "factor", "hits")

    def __init__(self) -> None:
        self.hits = self.expected = 0.0
        self.factor = 1.0

    def add(self, hit: bool, confidence: float) -> None:
        """Take in one node of a class."""
        self.hits = hits = self.hits * MEMORY + hit
        self.expected = expected = self.expected * MEMORY + confidence
        self.factor = (hits + BELIEF) / (expected + BELIEF)

    def settle(self, hits: float, expected: float, memory: float = SEQUENCE_MEMORY) -> None:
        """Take in one tree of a sequence."""
        self.hits = hits = self.hits * memory + hits
        self.expected = expected = self.expected * memory + expected
        self.factor = (hits + SEQUENCE_BELIEF) / (expected + SEQUENCE_BELIEF)


class Calibration:
    """Turns one proposer's confidences into estimates: corrected by what came of such confidences at such a depth in
    all sequences, then by how this sequence does against that. A new sequence starts where all of them are."""

    def __init__(self) -> None:
        self._records = [[_Record() for _ in range(BINS)] for _ in range(DEPTHS)]
        self._sequences: dict[int, _Record] = {}

    def estimates(self, order: int, proposal: Proposal, *, least: float = LEAST) -> list[float]:
        """Return for each node the probability that it is accepted, its parents included: never above its parent's. A
        chain ends before the first node below `least`."""
        sequence = self._sequences.get(order)
        own = 1.0 if sequence is None else sequence.factor
        records, last = self._records, DEPTHS - 1
        if is_chain(proposal.parents):
            return self._chain_estimates(own, proposal.confidences, least)
        depths: list[int] = []
        estimates: list[float] = []
        for parent, confidence in zip(proposal.parents, proposal.confidences, strict=True):
            depth = 0 if parent < 0 else depths[parent] + 1
            depths.append(depth)
            record = records[depth if depth < last else last][int(confidence * (BINS - 1))]
            estimate = confidence * record.factor * own
            if estimate > SURE:
                estimate = SURE
            estimates.append(estimate if parent < 0 else estimate * estimates[parent])
        return estimates

    def _chain_estimates(self, own: float, confidences: list[float], least: float) -> list[float]:
        estimates: list[float] = []
        total = 1.0
        row = self._records[0]
        for depth, confidence in enumerate(confidences):
            if 0 < depth < DEPTHS:
                row = self._records[depth]
            estimate = confidence * row[int(confidence * (BINS - 1))].factor * own
            total *= estimate if estimate < SURE else SURE
            if total < least:
                break
            estimates.append(total)
        return estimates

    def learn(self, order: int, parents: tuple[int, ...], confidences: list[float], path: list[int]) -> None:
        """Take in that of a verified tree those nodes were accepted that are in `path`. Only children of accepted nodes
        were tried: what hangs below a wrong guess says nothing."""
        sequence = self._sequences.get(order)
        if sequence is None:
            sequence = self._sequences[order] = _Record()
        hits = expected = 0.0
        if is_chain(parents):
            for depth in range(min(len(path) + 1, len(parents))):
                confidence = confidences[depth]
                record = self._records[depth if depth < DEPTHS else DEPTHS - 1][int(confidence * (BINS - 1))]
                hit = depth < len(path)
                expected += min(SURE, confidence * record.factor)
                hits += hit
                record.add(hit, confidence)
            sequence.settle(hits, expected)
            return
        parent = -1
        for depth in range(len(path) + 1):
            accepted = path[depth] if depth < len(path) else -1
            row = self._records[depth if depth < DEPTHS else DEPTHS - 1]
            for node in range(parent + 1, len(parents)):
                if parents[node] != parent:
                    continue
                hit = node == accepted
                confidence = confidences[node]
                record = row[int(confidence * (BINS - 1))]
                expected += min(SURE, confidence * record.factor)
                hits += hit
                record.add(hit, confidence)
            parent = accepted
        sequence.settle(hits, expected)

    def fade(self, order: int) -> None:
        """A guess for the sequence was not worth verifying: what is held against it is forgotten in time."""
        sequence = self._sequences.get(order)
        if sequence is not None:
            sequence.settle(0.0, 0.0, FADING)

    def forget(self, order: int) -> None:
        """Drop a sequence's record."""
        self._sequences.pop(order, None)
