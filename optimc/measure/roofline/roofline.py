"""How far a machine allows one plan to go: floors and predictions at batches and context lengths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from optimc.measure.roofline.bound import Floor

ROOFLINE_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Cell:
    """One batch at one context length."""

    batch: int
    context: int
    """Tokens of every sequence before the step; for TTFT, of the prompt."""
    bound: Floor
    predicted_tpot_ms: float | None
    predicted_ttft_ms: float | None
    """Of one prompt alone; in cells of batch 1 only."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """The whole table. `to_json` holds the rates too."""

    plan: str
    rates: Mapping[str, Any]
    """Of the machine, as JSON: MachineRates, or a GPU of the table."""
    cells: tuple[Cell, ...]
    compute_bound_batch: dict[int, int | None]
    """By context: the smallest batch whose decode step is limited by compute; None if none up to the plan's most."""
    kv_capacity_tokens: int
    kv_bytes_per_token: float
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return everything, so that `from_json` gives it back."""
        return {
            "format": ROOFLINE_FORMAT,
            "plan": self.plan,
            "rates": dict(self.rates),
            "cells": [asdict(cell) for cell in self.cells],
            "compute_bound_batch": {str(context): batch for context, batch in self.compute_bound_batch.items()},
            "kv_capacity_tokens": self.kv_capacity_tokens,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "notes": list(self.notes),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Roofline:
        """Inverse of `to_json`. Raises ValueError, LookupError or TypeError on anything else."""
        if data["format"] != ROOFLINE_FORMAT:
            raise ValueError(f"format {data['format']}, this optimc reads {ROOFLINE_FORMAT}")
        taken = {field.name: data[field.name] for field in fields(cls)}
        taken["cells"] = tuple(Cell(**{**cell, "bound": Floor(**cell["bound"])}) for cell in data["cells"])
        taken["compute_bound_batch"] = {int(context): batch for context, batch in data["compute_bound_batch"].items()}
        taken["notes"] = tuple(data["notes"])
        return cls(**taken)
