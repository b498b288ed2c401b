"""What passes that scale channels have in common: which stages can be scaled, and how that is reported.

A pass that scales looks at what each stage's linear layers read, and at the end of a decoder layer folds the scales it
chose into the layer. Why a layer is not scaled is told in its row of the report, where it survives a build that is
killed and resumed; decisions and metrics are made from the rows alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from optimc.errors import CheckpointError
from optimc.plan import LayerReport
from optimc_passes.base import Metrics
from optimc_passes.quantize.config import current_weight
from optimc_passes.quantize.folding import FoldPair
from optimc_passes.quantize.layer_report import error_metrics, weight_bytes
from optimc_passes.quantize.linears import LinearWeight
from optimc_passes.weights import Quantized, Weight

if TYPE_CHECKING:
    from optimc_passes.walk.activations import Activations

NOT_SCALED = "not scaled: "
NO_PRODUCER = f"{NOT_SCALED}nothing before it can take the scales"
UNDONE = f"{NOT_SCALED}with the scales folded the decoder layer computed something else"
NO_HEAD = f"{NOT_SCALED}it is the head, whose norm the search leaves alone"
NO_GAIN = f"{NOT_SCALED}no scales lower the error"


def dense_row(linear: LinearWeight, weights: Mapping[str, Weight], seconds: float, note: str | None) -> LayerReport:
    """Return the row of a layer that is not rounded yet: it came as `weights` hold it, and is float32 now."""
    return LayerReport(
        layer=linear.layer,
        seconds=seconds,
        bytes_before=weight_bytes(current_weight(linear, weights)),
        bytes_after=4 * linear.shape[0] * linear.shape[1],
        note=note,
    )


def foldable(pair: FoldPair | None, weights: Mapping[str, Weight]) -> str | None:
    """Return why a stage's columns cannot be scaled, as a note; None if they can."""
    if pair is None:
        return NO_PRODUCER
    rounded = [name for name in pair.weights if isinstance(weights[name], Quantized)]
    return f"{NOT_SCALED}{rounded[0]} is quantized already" if rounded else None


def magnitudes(inputs: Activations) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the mean and the largest |x| of each feature [C] over all tokens."""
    total = np.zeros(inputs.width, np.float64)
    largest = np.zeros(inputs.width, np.float32)
    for index in range(len(inputs.lengths)):
        window = np.abs(inputs.window(index))
        total += window.sum(axis=0, dtype=np.float64)
        largest = np.maximum(largest, window.max(axis=0))
    return (total / max(inputs.tokens, 1)).astype(np.float32), largest


def inputs_not_finite(linear: LinearWeight) -> CheckpointError:
    """Return the error that names a layer which reads infinities or NaN."""
    return CheckpointError(
        f"{linear.layer}: what it reads is not finite on the calibration text; a weight before it is damaged, or "
        "its activations are beyond float32's range"
    )


def scaling_decisions(rows: Iterable[LayerReport]) -> tuple[str, ...]:
    """Return a sentence for each reason why layers were not scaled."""
    by_note: dict[str, list[str]] = {}
    for row in rows:
        if row.note is not None and row.note.startswith(NOT_SCALED):
            by_note.setdefault(row.note, []).append(row.layer)
    return tuple(
        f"{layers[0]} is {note}" if len(layers) == 1 else f"{len(layers)} layers, e.g. {layers[0]}, are {note}"
        for note, layers in by_note.items()
    )


def row_metrics(rows: Sequence[LayerReport]) -> Metrics:
    """Return a pass's figures over its layers."""
    metrics: Metrics = {
        "layers": len(rows),
        "scaled": sum(row.note is None or not row.note.startswith(NOT_SCALED) for row in rows),
        "bytes_before": sum(row.bytes_before for row in rows),
        "bytes_after": sum(row.bytes_after for row in rows),
    }
    return metrics | error_metrics(rows)


def held_moments(linears: Iterable[LinearWeight]) -> int:
    """Return the bytes of all second moments of one decoder layer, which are kept until the layer is done."""
    by_layer: dict[str, set[tuple[str, int]]] = {}
    for linear in linears:
        if not linear.is_head:
            half = linear.layer.rpartition(".")[0]
            by_layer.setdefault(half.rpartition(".")[0], set()).add((half, linear.shape[1]))
    # Where attention's output is as wide as its input, two stages of one half have the same width.
    return max((2 * 4 * sum(width**2 for _, width in widths) for widths in by_layer.values()), default=0)
