"""What a million output tokens cost on a machine of a given price."""

from __future__ import annotations

from dataclasses import dataclass

from optimc.errors import ConfigError, Fault
from optimc.measure.compare.measurement import Measurement


@dataclass(frozen=True, slots=True)
class Price:
    """What the machine costs. Raises ConfigError with all faults at once."""

    per_hour: float
    currency: str = "USD"

    def __post_init__(self) -> None:
        faults = []
        if not 0 < self.per_hour < float("inf"):
            faults.append(Fault("--machine-price", f"must be a price per hour above 0, got {self.per_hour:g}"))
        if not self.currency.strip() or len(self.currency) > 8:
            faults.append(Fault("--currency", f"must be a name like USD or EUR, got {self.currency!r}"))
        if faults:
            raise ConfigError("options", faults)


def cost_per_million(price_per_hour: float, tokens_per_s: float) -> float:
    """Return the price of a million tokens: price / 3600 s / (tokens/s) * 10^6. `tokens_per_s` is above 0."""
    return price_per_hour / 3600 / tokens_per_s * 1e6


def sellable_tokens_per_s(measurement: Measurement) -> float | None:
    """Return the output tokens per second that the cost is shared by.

    With a ladder: those of requests within the limits, at the knee, and None without a knee. Else the most of any
    concurrency. None where nothing was measured.
    """
    ladder = measurement.ladder
    if ladder is not None:
        step = next((step for step in ladder.steps if step.rate_per_s == ladder.knee.rate_per_s), None)
        if step is None or step.result.goodput is None:
            return None
        return step.result.goodput.per_s * ladder.workload.output_tokens or None
    rates = [load.output_tokens_per_s for load in measurement.loads if load.output_tokens_per_s]
    return max(rates, default=None)


def row_cost(price: Price, measurement: Measurement) -> float | None:
    """Return the price of a million output tokens, or None where there is no rate."""
    rate = sellable_tokens_per_s(measurement)
    return None if rate is None else cost_per_million(price.per_hour, rate)
