"""The share of what the machine allows that one bench row reached, and what limits it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

Limiter = Literal["memory", "compute"]


@dataclass(frozen=True, slots=True)
class RowBound:
    """Floors under one row's figures. Shares are floor over measured median: 1 is as fast as the machine allows."""

    tpot_ms: float | None
    tpot_share: float | None
    """None where the floor does not apply to what was measured; above 1 if the floor was beaten."""
    ttft_ms: float | None
    """None unless one client sent prompts of which nothing was cached."""
    ttft_share: float | None
    limiter: Limiter
    """Of TPOT."""
    predicted_tpot_ms: float | None
    note: str
    """What to know about these figures; "" for nothing."""

    @property
    def is_beaten(self) -> bool:
        """Whether something measured was faster than its floor."""
        return any(share is not None and share > 1 for share in (self.tpot_share, self.ttft_share))

    def to_json(self) -> dict[str, Any]:
        """Return all fields."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RowBound:
        """Inverse of `to_json`. Raises KeyError on anything else."""
        return cls(**{field.name: data[field.name] for field in fields(cls)})

    def __str__(self) -> str:
        if self.tpot_share is None:
            return self.note or "n/a"
        text = f"{self.tpot_share:.0%} of bound, limited by {self.limiter}"
        return f"{text} ({self.note})" if self.note else text
