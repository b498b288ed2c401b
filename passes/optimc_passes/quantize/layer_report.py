"""What a quantizing pass says about its layers, put together from one row per layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from optimc.plan import LayerReport
from optimc_passes.base import Metrics
from optimc_passes.weights import Dense, Quantized, Weight

SCALE_BYTES = 2
"""Scales are float16 numbers wherever weights allow it, and stored so."""


def packed_bytes(weight: Quantized) -> int:
    """Bytes of a quantized weight at its nominal width: codes and zero points packed, float32 scales, permutation."""
    zeros = 0 if weight.zeros is None else int(np.prod(weight.zeros.shape))
    code_bits = (int(np.prod(weight.shape)) + zeros) * weight.bits
    return (code_bits + 7) // 8 + weight.scales.nbytes + (weight.permutation.nbytes if weight.permutation else 0)


def weight_bytes(weight: Weight) -> int:
    """Bytes of a weight as `LayerReport` counts them: as it lies there, or packed."""
    return weight.nbytes if isinstance(weight, Dense) else packed_bytes(weight)


def stored_bytes(weight: Quantized) -> int:
    """Bytes of a quantized weight as kernels read it: 2 and 3 bits take 4, more than 4 take 8; float16 scales."""
    width = 4 if weight.bits <= 4 else 8
    groups = int(np.prod(weight.scales.shape))
    permutation = weight.permutation.nbytes if weight.permutation else 0
    zeros = groups if weight.zeros is not None else 0
    return (int(np.prod(weight.shape)) * width + 7) // 8 + groups * SCALE_BYTES + zeros + permutation


def quantized_metrics(rows: Sequence[LayerReport], weights: Mapping[str, Weight], skipped: int) -> Metrics:
    """Return the figures of a whole pass: `rows` of its layers, and the `weights` it made."""
    codes = [weight for weight in weights.values() if isinstance(weight, Quantized)]
    elements = sum(int(np.prod(weight.shape)) for weight in codes)
    metrics: Metrics = {
        "layers": len(codes),
        "skipped": skipped,
        "bytes_before": sum(row.bytes_before for row in rows),
        "bytes_after": sum(row.bytes_after for row in rows),
        "stored_bytes": sum(map(stored_bytes, codes)),
        "payload_bits": sum(weight.bits * int(np.prod(weight.shape)) for weight in codes) / max(elements, 1),
    }
    return metrics | error_metrics(rows)


def error_metrics(rows: Sequence[LayerReport]) -> Metrics:
    """Return the mean and the largest of the layers' errors, and whose that is; nothing where none has an error."""
    errors = {row.layer: row.error for row in rows if row.error is not None}
    if not errors:
        return {}
    worst = max(errors, key=errors.__getitem__)
    return {
        "relative_error_mean": sum(errors.values()) / len(errors),
        "relative_error_max": errors[worst],
        "worst_layer": worst,
    }
