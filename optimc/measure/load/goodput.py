"""How many requests were of use: those within every limit of a service level objective."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from optimc.measure.exchange import Exchange
from optimc.measure.load.slo import Broken, Slo


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests within the limits, and what the others broke."""

    met: int
    of: int
    """All measured requests, failed ones included."""
    per_s: float
    """Met requests over the whole time, from the first one sent or due to the last one ended."""
    broken: dict[str, int]
    """By "ttft", "tpot", "e2e" and "failure": requests that broke it. One may break several."""

    @classmethod
    def of_run(cls, slo: Slo, measured: Sequence[Exchange], wall_s: float) -> Goodput:
        """Judge each request."""
        broken = Counter(name for exchange in measured for name in slo.broken_by(exchange))
        met = sum(slo.met_by(exchange) for exchange in measured)
        names: list[Broken] = [*slo.limited, "failure"]
        per_s = met / wall_s if wall_s > 0 else 0.0
        return cls(met, len(measured), per_s, {name: broken[name] for name in names})

    @property
    def share(self) -> float:
        """Met requests of all, 0..1."""
        return self.met / self.of if self.of else 0.0

    def attained(self, name: str) -> float:
        """Return the share of requests that kept one limit, whatever became of the others."""
        return 1 - self.broken.get(name, 0) / self.of if self.of else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the fields and the share."""
        return {**asdict(self), "share": self.share}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Goodput:
        """Read what `to_json` gave."""
        return cls(data["met"], data["of"], data["per_s"], dict(data["broken"]))

    def __str__(self) -> str:
        causes = ", ".join(f"{count} broke {name}" for name, count in self.broken.items() if count)
        text = f"{self.met} of {self.of} requests within the limits ({self.share:.1%}), {self.per_s:.3g}/s"
        return f"{text}; {causes}" if causes else text
