"""Shapes of a call: those of a decode call are rounded up to few, so that each is prepared once and then comes back.

Letters: T tokens, B sequences, Q longest query, C longest context in reach, R rows that need logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from optimc.plan.tensorrt_program import ShapeLetter

SHORTEST_CONTEXT = 64


@dataclass(frozen=True, slots=True)
class CallShapes:
    """What a call's inputs measure. None is ever 0."""

    tokens: int
    sequences: int
    queries: int
    rows: int
    contexts: tuple[int, ...]
    """C of each window, as `TensorRtAttention.windows` lists them."""

    def at_least_one(self) -> CallShapes:
        """Return them with 1 for 0: an engine has no empty inputs."""
        contexts = tuple(max(1, context) for context in self.contexts)
        return CallShapes(self.tokens, self.sequences, self.queries, max(1, self.rows), contexts)

    def rounded_up(self, largest: Mapping[ShapeLetter, int]) -> CallShapes:
        """Return the bucket these shapes fall into: powers of two, for contexts also the middle between two, none above
        the profile's `largest`."""
        return CallShapes(
            tokens=_power(self.tokens, largest["T"]),
            sequences=_power(self.sequences, largest["B"]),
            queries=_power(self.queries, largest["Q"]),
            rows=_power(self.rows, largest["R"]),
            contexts=tuple(_context(context, largest["C"]) for context in self.contexts),
        )


def _power(count: int, largest: int) -> int:
    """1, 2, 4 … and `largest`."""
    power: int = 1 << max(0, count - 1).bit_length()
    return max(1, min(power, largest))


def _context(count: int, largest: int) -> int:
    """64, 96, 128, 192, 256 … and `largest`: padding is a third of the context at most."""
    power = max(SHORTEST_CONTEXT, _power(count, 1 << 62))
    middle = power * 3 // 4
    if SHORTEST_CONTEXT <= middle >= count:
        power = middle
    return min(power, largest)
