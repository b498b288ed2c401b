"""A recipe or plan that a comparison has no figures of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Failure:
    """It could not be built, opened or measured; the others were."""

    name: str
    path: Path
    """Of the recipe, where there is no plan."""
    reason: str
    """In one line."""

    def __str__(self) -> str:
        return f"{self.name}: no figures: {self.reason}"

    def to_json(self) -> dict[str, str]:
        """Return all fields."""
        return {"name": self.name, "path": str(self.path), "reason": self.reason}
