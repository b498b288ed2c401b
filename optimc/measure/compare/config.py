"""What a comparison measures of every plan."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from optimc.errors import ConfigError, Fault
from optimc.measure.load.slo import Slo
from optimc.measure.store import EngineSwitches
from optimc.measure.workload import Workload


@dataclass(frozen=True, slots=True)
class CompareConfig:
    """How every plan is measured. Raises ConfigError with all faults at once."""

    prompt_tokens: int = 512
    output_tokens: int = 128
    concurrencies: tuple[int, ...] = (1, 8)
    """Ascending; TTFT and TPOT in the table are those of the first."""
    requests: int | None = None
    """Measured at each concurrency; None as in Workload, and never fewer than the concurrency."""
    warmup_requests: int | None = None
    seed: int = 0
    threads: int | None = None
    """What `open_engine` gives the engines; here because figures of other thread counts are other figures."""
    windows: int = 16
    """Evaluation windows."""
    length: int = 512
    """Tokens per evaluation window."""
    repeats: int = 1
    """Runs of each benchmark; from three on, figures are medians over runs with intervals between them."""
    slo: Slo | None = None
    """Limits a request must keep."""
    ladder: bool = False
    """Raise the arrival rate until the limits break."""
    attain: float = 0.95
    """Share of requests that must keep the limits at a rate."""
    rates: tuple[float, ...] | None = None
    """The ladder's rates in requests/s, ascending; None: found by searching."""

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in zip(self.concurrencies, self.concurrencies[1:], strict=False))
        rates = self.rates or ()
        rising = all(a < b for a, b in zip((0.0, *rates), (*rates, math.inf), strict=False))
        rules = [
            ("concurrencies", bool(self.concurrencies) and ascending, "at least one, ascending"),
            ("windows", self.windows >= 1, "at least 1"),
            ("length", self.length >= 2, "at least 2"),
            ("repeats", self.repeats >= 1, "at least 1"),
            ("attain", 0 < self.attain <= 1, "above 0 and at most 1"),
            ("rates", self.rates is None or (bool(rates) and rising), "at least one, above 0, ascending"),
        ]
        faults = [Fault(name, f"must be {rule}, got {getattr(self, name)}") for name, ok, rule in rules if not ok]
        if self.ladder and self.slo is None:
            faults.append(Fault("ladder", "needs limits to find the rate at which they break; give slo, as ttft=500"))
        if self.rates is not None and not self.ladder:
            faults.append(Fault("rates", "are those of a ladder; ask for one"))
        if faults:
            raise ConfigError("comparison options", faults)
        self.benches()

    def benches(self) -> list[Workload]:
        """Return the benchmark of each concurrency."""
        requests = self.requests
        return [
            replace(self._base, concurrency=c, requests=None if requests is None else max(requests, c))
            for c in self.concurrencies
        ]

    def ladder_workload(self) -> Workload:
        """Return what the ladder's steps send, but for their rate."""
        return self._base

    @property
    def _base(self) -> Workload:
        return Workload(
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            warmup_requests=self.warmup_requests,
            seed=self.seed,
            slo=self.slo,
        )

    @property
    def switches(self) -> EngineSwitches:
        """The engine options every plan is measured under."""
        return EngineSwitches(threads=self.threads)

    @property
    def setting(self) -> str:
        """The lengths and limits, for the reader."""
        limits = "" if self.slo is None else f", limits {self.slo}"
        repeats = "" if self.repeats == 1 else f", each run {self.repeats} times"
        return (
            f"{self.prompt_tokens} prompt + {self.output_tokens} output tokens{limits}{repeats}, "
            f"quality over {self.windows} × {self.length} tokens"
        )
