"""Limits that a request must keep to be of use: "ttft=500", "tpot=40", "e2e=9000", in milliseconds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from optimc.errors import ConfigError, Fault
from optimc.measure.exchange import Exchange

Broken = Literal["ttft", "tpot", "e2e", "failure"]
"""What a request was not good enough in."""

LATENCIES: tuple[Literal["ttft", "tpot", "e2e"], ...] = ("ttft", "tpot", "e2e")
"""What can be limited."""


@dataclass(frozen=True, slots=True)
class Slo:
    """Service level objective of one request: every limit that is set must hold. Raises ConfigError with all faults."""

    ttft_ms: float | None = None
    """Most milliseconds to the first token."""
    tpot_ms: float | None = None
    """Most milliseconds per later token, on average over the request."""
    e2e_ms: float | None = None
    """Most milliseconds to the end."""

    def __post_init__(self) -> None:
        limits = {name: getattr(self, f"{name}_ms") for name in LATENCIES}
        faults = [
            Fault(f"slo {name}", f"must be a number of milliseconds above 0, got {limit}")
            for name, limit in limits.items()
            if limit is not None and not 0 < limit < math.inf
        ]
        if not any(limit is not None for limit in limits.values()):
            faults.append(Fault("slo", "sets no limit; give at least one of ttft=MS, tpot=MS, e2e=MS"))
        if faults:
            raise ConfigError("service level objective", faults)

    @classmethod
    def parse(cls, parts: Sequence[str]) -> Slo:
        """Read "ttft=500" and the like; one part may hold several, with commas. Raises ConfigError with all faults."""
        words = [word.strip() for part in parts for word in part.split(",") if word.strip()]
        limits: dict[str, float] = {}
        faults: list[Fault] = []
        for word in words:
            name, equals, text = word.partition("=")
            if name not in LATENCIES or not equals:
                faults.append(Fault("--slo", f"{word!r} is not a limit; write ttft=MS, tpot=MS or e2e=MS"))
                continue
            if name in limits:
                faults.append(Fault("--slo", f"{name} is limited twice"))
            try:
                limits[name] = float(text)
            except ValueError:
                faults.append(Fault("--slo", f"{word!r}: {text!r} is no number of milliseconds"))
                continue
            if not 0 < limits[name] < math.inf:
                faults.append(Fault("--slo", f"{word!r}: must be above 0"))
        if not words:
            faults.append(Fault("--slo", "sets no limit; give at least one of ttft=MS, tpot=MS, e2e=MS"))
        if faults:
            raise ConfigError("options", faults)
        return cls(**{f"{name}_ms": limit for name, limit in limits.items()})

    @classmethod
    def from_json(cls, data: Mapping[str, float | None]) -> Slo:
        """Read what `to_json` gave."""
        return cls(**data)

    def to_json(self) -> dict[str, float | None]:
        """Return all limits, in milliseconds."""
        return {f"{name}_ms": self.limit_ms(name) for name in LATENCIES}

    def limit_ms(self, name: str) -> float | None:
        """Return the limit of "ttft", "tpot" or "e2e"; None when there is none."""
        limit: float | None = getattr(self, f"{name}_ms")
        return limit

    @property
    def limited(self) -> tuple[Literal["ttft", "tpot", "e2e"], ...]:
        """Names of the latencies that have a limit."""
        return tuple(name for name in LATENCIES if self.limit_ms(name) is not None)

    def broken_by(self, exchange: Exchange) -> frozenset[Broken]:
        """Return what the request was not good enough in; a failed one is only that.

        An output of one token has no time per token, and is not judged by it.
        """
        if not exchange.succeeded:
            return frozenset({"failure"})
        return frozenset(name for name in self.limited if self._is_above(name, exchange))

    def met_by(self, exchange: Exchange) -> bool:
        """Whether the request succeeded within every limit."""
        return not self.broken_by(exchange)

    def _is_above(self, name: str, exchange: Exchange) -> bool:
        limit, seconds = self.limit_ms(name), getattr(exchange, f"{name}_s")
        return limit is not None and seconds is not None and seconds * 1000 > limit

    def __str__(self) -> str:
        return ", ".join(f"{name} <= {self.limit_ms(name):g} ms" for name in self.limited)
