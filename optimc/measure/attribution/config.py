"""How an attribution is measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from optimc.errors import ConfigError, Fault
from optimc.measure.load.slo import Slo
from optimc.measure.workload import Workload
from optimc_runtime.config import SpeculationOptions

AttributeMode = Literal["leave-one-out", "cumulative", "both"]
MIN_PAIRS = 3
"""Fewer give no interval."""


@dataclass(frozen=True, slots=True)
class AttributeConfig:
    """What is compared, under which loads, and for how long. Raises ConfigError with all faults at once."""

    mode: AttributeMode = "both"
    pairs: int = 4
    """Rounds of four blocks: with, without, without, with."""
    concurrencies: tuple[int, ...] = (1, 8)
    """Ascending numbers of clients; each is a workload of its own."""
    prompt_tokens: int = 512
    output_tokens: int = 64
    requests: int | None = None
    """Measured per block; None means max(8, 4 * concurrency), and never fewer than the concurrency."""
    seed: int = 0
    """Of the prompts; each pair adds its number, so both sides of a pair get the same ones."""
    budget_s: float | None = None
    """Time for everything, builds included; what does not fit is left out and said."""
    knee: bool = False
    """Also climb a ladder for every variant."""
    slo: Slo | None = None
    """Limits of the ladder."""
    attain: float = 0.95
    """Share of requests that must keep them."""
    speculation: str | None = None
    """How the engine guesses ahead, as `--speculation` takes it; None: by the plan's heads, if it has any."""
    windows: int = 16
    """Evaluation windows for KL; 0 measures none."""
    length: int = 512
    """Tokens per window."""
    threads: int | None = None

    def __post_init__(self) -> None:
        counts = self.concurrencies
        ascending = bool(counts) and all(a < b for a, b in zip((0, *counts), counts, strict=False))
        rules = [
            ("mode", self.mode in get_args(AttributeMode), "leave-one-out, cumulative or both"),
            ("pairs", self.pairs >= MIN_PAIRS, f"at least {MIN_PAIRS}: fewer give no interval"),
            ("concurrencies", ascending, "at least one number, ascending, from 1"),
            ("prompt_tokens", self.prompt_tokens >= 1, "at least 1"),
            ("output_tokens", self.output_tokens >= 2, "at least 2: one token has no time per token"),
            ("requests", self.requests is None or self.requests >= 1, "at least 1"),
            ("budget_s", self.budget_s is None or self.budget_s > 0, "above 0"),
            ("attain", 0 < self.attain <= 1, "above 0 and at most 1"),
            ("windows", self.windows >= 0, "at least 0"),
            ("length", self.length >= 2, "at least 2"),
        ]
        faults = [Fault(name, f"must be {rule}, got {getattr(self, name)}") for name, ok, rule in rules if not ok]
        if self.knee and self.slo is None:
            faults.append(Fault("knee", "needs limits: give --slo ttft=MS,tpot=MS"))
        if self.speculation is not None:
            try:
                SpeculationOptions.parse(self.speculation)
            except ConfigError as error:
                faults += error.faults
        if faults:
            raise ConfigError("attribution options", faults)

    def workloads(self) -> tuple[Workload, ...]:
        """Return the load of each concurrency."""
        return tuple(self.workload(concurrency) for concurrency in self.concurrencies)

    def workload(self, concurrency: int, **changes: Any) -> Workload:
        """Return the load of so many clients; keywords change it."""
        asked = self.requests
        options = {
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "concurrency": concurrency,
            "requests": None if asked is None else max(asked, concurrency),
            "warmup_requests": 1 + concurrency,
            "seed": self.seed,
        }
        return Workload(**{**options, **changes})

    def to_json(self) -> dict[str, Any]:
        """Return all fields."""
        return {**asdict(self), "concurrencies": list(self.concurrencies)}
