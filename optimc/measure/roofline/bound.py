"""Floors: times that no run of a plan on a machine beats."""

from __future__ import annotations

from dataclasses import dataclass

from optimc.measure.roofline.row_bound import Limiter


@dataclass(frozen=True, slots=True)
class Floor:
    """Least milliseconds at one batch and context, and what they come from."""

    tpot_ms: float
    ttft_ms: float | None
    """Of one prompt as long as the context; None for larger batches."""
    limiter: Limiter
    """Of TPOT."""
    weight_bytes: int
    """Of one decode step, like what follows."""
    kv_bytes: int
    ops: int
