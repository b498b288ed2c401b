"""Quality gates: what a recipe promises about its plan, held against what was measured."""

from __future__ import annotations

import math

from optimc.measure.evaluation import EvalResult
from optimc.recipe import QualitySpec


def failed_gates(gates: QualitySpec, measured: EvalResult) -> tuple[str, ...]:
    """Return one sentence per gate that does not hold. A gate on something unmeasured does not hold."""
    ratio = None
    if measured.reference_perplexity is not None:
        ratio = measured.perplexity / measured.reference_perplexity
    faults = (
        _above("max_kl", gates.max_kl, measured.kl_mean),
        _below("min_top1", gates.min_top1, measured.top1_agreement),
        _above("max_perplexity_ratio", gates.max_perplexity_ratio, ratio),
    )
    return tuple(fault for fault in faults if fault is not None)


def _above(name: str, limit: float | None, value: float | None) -> str | None:
    if limit is None or (value is not None and value <= limit):
        return None
    return _sentence(name, limit, value)


def _below(name: str, limit: float | None, value: float | None) -> str | None:
    if limit is None or (value is not None and value >= limit):
        return None
    return _sentence(name, limit, value)


def _sentence(name: str, limit: float, value: float | None) -> str:
    found = "not measured" if value is None or math.isnan(value) else f"measured {value:.4g}"
    return f"{name} {limit:g}: {found}"
