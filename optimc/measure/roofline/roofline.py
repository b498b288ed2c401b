"""How far a machine allows one plan to go: floors and predictions at batches and context lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from optimc.errors import ConfigError, Fault
from optimc.measure.roofline.bound import Floor, cell_floor, compute_bound_batch
from optimc.measure.roofline.gpu_table import Gpu
from optimc.measure.roofline.predict import predict_prefill_s, predict_step_s
from optimc.measure.roofline.rates import MachineRates
from optimc.measure.roofline.work import PlanWork, StepShape
from optimc.plan import Plan

ROOFLINE_FORMAT = 1
BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (128, 512, 2048)


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


def roofline(
    plan: Plan,
    rates: MachineRates | Gpu,
    *,
    batches: Sequence[int] = BATCHES,
    contexts: Sequence[int] = CONTEXTS,
) -> Roofline:
    """Return floors, and on a measured machine predictions, of every batch up to the plan's most sequences at every
    context, clipped to its longest sequence.

    Raises ConfigError for a batch or context that is none.
    """
    limits = plan.manifest.limits
    faults = [
        Fault(name, f"must be at least 1, got {value}")
        for name, values in (("--batch", batches), ("--context", contexts))
        for value in values
        if value < 1
    ]
    if faults:
        raise ConfigError("roofline options", faults)
    work = PlanWork.of(plan)
    lengths = sorted({min(context, limits.max_seq_len - 1) for context in contexts})
    sizes = sorted({min(batch, limits.max_seqs) for batch in batches})
    per_token = sum(work.kv_bytes)
    block_bytes = round(per_token * plan.manifest.kv.block_size)
    blocks = limits.kv_memory_bytes // block_bytes
    return Roofline(
        plan=plan.manifest.name,
        rates=rates.to_json(),
        cells=tuple(_cell(plan, work, rates, batch, context) for context in lengths for batch in sizes),
        compute_bound_batch={
            context: compute_bound_batch(work, rates, context, limits.max_seqs) for context in lengths
        },
        kv_capacity_tokens=blocks * plan.manifest.kv.block_size,
        kv_bytes_per_token=per_token,
        notes=tuple(_notes(plan, work, rates)),
    )


def _cell(plan: Plan, work: PlanWork, rates: MachineRates | Gpu, batch: int, context: int) -> Cell:
    vocab, most = plan.manifest.model.vocab_size, work.max_step_tokens
    tpot_s = ttft_s = None
    if isinstance(rates, MachineRates) and work.program is not None:
        tpot_s = predict_step_s(work, rates, StepShape.decode(batch, context), vocab)
        ttft_s = predict_prefill_s(work, rates, context, most, vocab) if batch == 1 else None
    return Cell(
        batch,
        context,
        cell_floor(work, rates, batch, context),
        None if tpot_s is None else tpot_s * 1e3,
        None if ttft_s is None else ttft_s * 1e3,
    )


def _notes(plan: Plan, work: PlanWork, rates: MachineRates | Gpu) -> list[str]:
    notes = []
    if isinstance(rates, Gpu):
        notes.append(
            f"{rates.name}: datasheet, not measured ({rates.source}); no predictions, and a plan that fits the GPU's "
            "cache may beat the floors"
        )
    if work.program is None:
        notes.append(
            f"target {plan.manifest.target.backend} has no program to count: bytes of weights and caches only, "
            "no operations, no predictions"
        )
    return notes
