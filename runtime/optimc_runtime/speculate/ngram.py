"""Guesses copied from the sequence itself: what followed the last time the text ran as it does now.

Costs microseconds and needs no model. Where text repeats (code, quotations, lists, loops) it guesses well, elsewhere
hardly ever, and then knows it: the longer the run that repeats, the likelier it goes on.
"""

from __future__ import annotations

from itertools import pairwise

from optimc_runtime.sequence import Sequence
from optimc_runtime.speculate.proposal import Proposal
from optimc_runtime.speculate.tree import ProposerName, chain

MOST_CANDIDATES = 8
"""Earlier places that are compared, latest first."""
LONGEST = 32
"""Runs are measured up to this length."""
MOST_FED = 512
"""Tokens indexed at once, of all sequences: everybody waits meanwhile. A long prompt is read over several steps."""


def _confidences() -> tuple[float, ...]:
    """How likely a copied token is right after a run of 0, 1, .. tokens that agree: a first belief, corrected by what
    comes of it."""
    knots = ((0, 0.1), (1, 0.15), (2, 0.3), (3, 0.42), (4, 0.52), (6, 0.66), (8, 0.75), (16, 0.88), (LONGEST, 0.95))
    table: list[float] = []
    for (start, low), (end, high) in pairwise(knots):
        table += [low + (high - low) * (length - start) / (end - start) for length in range(start, end)]
    return tuple(table)


_TABLE = [*_confidences(), *[0.95] * 1024]


class NgramProposer:
    """Looks up the last `shortest` tokens of a sequence in what came before, takes the place with the longest common
    run (the latest of the first that reach `longest`), and copies what followed there."""

    name: ProposerName = "ngram"
    times_itself = False

    def __init__(self, shortest: int, longest: int) -> None:
        assert 1 <= shortest <= longest
        self.cost_s = 5e-6
        self._shortest = shortest
        self._longest = longest
        self._indexes: dict[int, _Index] = {}

    def propose(self, sequences: list[Sequence], most_depth: int) -> list[Proposal | None]:
        """Return a chain for each sequence that is indexed to its end, and whose end has been seen before."""
        proposals: list[Proposal | None] = []
        left = MOST_FED
        for sequence in sequences:
            index = self._indexes.get(sequence.order)
            if index is None:
                index = self._indexes[sequence.order] = _Index(self._shortest)
            known = len(index.tokens)
            count = min(sequence.num_tokens - known, left)
            if count > 0:
                index.feed(sequence.tokens[known : known + count].tolist())
                left -= count
            if len(index.tokens) < sequence.num_tokens:
                proposals.append(None)
                continue
            start, length = index.find(self._longest)
            if start and most_depth > 0:
                tokens = index.copy(start, most_depth)
                count = len(tokens)
                proposals.append(Proposal(chain(count), tokens, _TABLE[length : length + count]))
            else:
                proposals.append(None)
        return proposals

    def forget(self, sequence: Sequence) -> None:
        """Drop the sequence's index."""
        self._indexes.pop(sequence.order, None)

    def close(self) -> None:
        """Drop all indexes."""
        self._indexes.clear()


class _Index:
    """A text, and for every run of `shortest` tokens where it last ended, and where it ended before that."""

    __slots__ = ("_earlier", "_latest", "_shortest", "tokens")

    def __init__(self, shortest: int) -> None:
        self.tokens: list[int] = []
        self._shortest = shortest
        self._latest: dict[tuple[int, ...], int] = {}
        self._earlier: list[int] = []
        """By place: the place before it where the same run ended; 0 for none. A place is the index of what follows."""

    def feed(self, tokens: list[int]) -> None:
        """Append to the text."""
        known, latest, earlier, shortest = self.tokens, self._latest, self._earlier, self._shortest
        if not known:
            earlier.append(0)
        first = len(known) + 1
        known += tokens
        for place in range(first, len(known) + 1):
            if place < shortest:
                earlier.append(0)
                continue
            key = tuple(known[place - shortest : place])
            earlier.append(latest.get(key, 0))
            latest[key] = place

    def find(self, enough: int) -> tuple[int, int]:
        """Return the place before the end that the text before agrees with longest, and the length of that run; 0, 0
        if not even the shortest run was seen before."""
        tokens, earlier = self.tokens, self._earlier
        end = len(tokens)
        best = longest = 0
        place = earlier[end]
        for _ in range(MOST_CANDIDATES):
            if not place:
                break
            length = self._shortest
            most = min(place, LONGEST)
            while length < most and tokens[place - 1 - length] == tokens[end - 1 - length]:
                length += 1
            if length > longest:
                best, longest = place, length
                if length >= enough:
                    break
            place = earlier[place]
        return best, longest

    def copy(self, place: int, count: int) -> list[int]:
        """Return the `count` tokens from `place` on; where they run into the end, the text is taken to repeat."""
        copied = self.tokens[place : place + count]
        while len(copied) < count:
            copied += copied[: count - len(copied)]
        return copied
