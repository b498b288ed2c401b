"""What a loop leaves behind: every request it sent, and how many there were at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from optimc.measure.exchange import Exchange


@dataclass(slots=True)
class LoadRun:
    """All requests of one run, each in the order of its end."""

    cold: Exchange | None = None
    warmup: list[Exchange] = field(default_factory=list)
    """Without the cold one."""
    measured: list[Exchange] = field(default_factory=list)
    fillers: list[Exchange] = field(default_factory=list)
    """Ended or cancelled."""
    steady_start_s: float = 0.0
    """Closed loop: when the last client sent its first measured request. Open loop: when the first one was due."""
    window_end_s: float | None = None
    """Open loop: when the first request after the measured ones was due."""
    not_sent: int = 0
    """Measured turns of conversations in which an earlier turn failed."""

    def in_flight(self, at_s: float) -> int:
        """Return the number of requests running at a moment."""
        return sum(sent_s <= at_s < end_s for sent_s, end_s in self._spans())

    def mean_in_flight(self, start_s: float, end_s: float) -> float:
        """Return the mean number of requests running, over time."""
        if end_s <= start_s:
            return 0.0
        overlaps = (min(end, end_s) - max(sent, start_s) for sent, end in self._spans())
        return sum(overlap for overlap in overlaps if overlap > 0) / (end_s - start_s)

    def in_flight_thirds(self) -> tuple[float, float, float] | None:
        """Return that mean over each third of an open loop's window; None for a closed loop."""
        if self.window_end_s is None:
            return None
        third = (self.window_end_s - self.steady_start_s) / 3
        edges = [self.steady_start_s + third * k for k in range(4)]
        first, second, last = (self.mean_in_flight(a, b) for a, b in pairwise(edges))
        return first, second, last

    def _spans(self) -> Iterator[tuple[float, float]]:
        """Yield when each request was sent and ended; what was cut off ran on to the end."""
        for exchange in (*([self.cold] if self.cold else []), *self.warmup, *self.measured, *self.fillers):
            yield exchange.sent_s, float("inf") if exchange.end_s is None else exchange.end_s
