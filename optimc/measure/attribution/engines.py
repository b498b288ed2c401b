"""The two engines of a comparison: both loaded where memory allows, otherwise one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from optimc.errors import MeasureError
from optimc.measure.attribution.paired import Side
from optimc.measure.served_engine import ServedEngine
from optimc.measure.store import EngineSwitches, PlanSubject

OpenEngine = Callable[[Path, EngineSwitches], ServedEngine]
"""Loads and starts an engine."""

BOTH_SHARE = 0.6
"""Share of the free memory that two loaded engines may take; the rest is for steps and for whoever else is there."""
ALONE_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Contender:
    """One side: a plan, and how it is run."""

    subject: PlanSubject
    switches: EngineSwitches

    @property
    def needs_bytes(self) -> int:
        """Plan and KV pool."""
        return self.subject.size_bytes + self.subject.manifest.limits.kv_memory_bytes


def why_too_large(contender: Contender, available: int | None) -> str | None:
    """Return why an engine of this plan is better not opened, with numbers; None if it fits."""
    if available is None or contender.needs_bytes <= ALONE_SHARE * available:
        return None
    return (
        f"{contender.subject.name} needs {contender.needs_bytes / 2**20:,.0f} MiB (plan and KV pool), "
        f"{available / 2**20:,.0f} MiB are free; lower limits.kv_memory or free some"
    )


class Engines:
    """Opens each side when it is first asked for. A context: leaving it closes what is open."""

    def __init__(self, sides: dict[Side, Contender], open_engine: OpenEngine, available: int | None) -> None:
        self._sides = sides
        self._open_engine = open_engine
        self._available = available
        # An unknown amount of memory is no reason to trust there is enough.
        needed = sum(side.needs_bytes for side in sides.values())
        self.keeps_both = available is not None and needed <= BOTH_SHARE * available
        self._open: dict[Side, ServedEngine] = {}

    def __call__(self, side: Side) -> ServedEngine:
        """Return a side's engine. Raises MeasureError if it does not fit in memory."""
        if side in self._open:
            return self._open[side]
        if not self.keeps_both:
            self.close()
        reason = why_too_large(self._sides[side], self._available)
        if reason is not None:
            raise MeasureError(reason)
        contender = self._sides[side]
        self._open[side] = self._open_engine(contender.subject.path, contender.switches)
        return self._open[side]

    def close(self) -> None:
        """Close what is open."""
        while self._open:
            self._open.popitem()[1].close()

    def __enter__(self) -> Engines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
