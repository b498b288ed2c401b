"""What SmoothQuant does at each decoder layer of the walk."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from optimc.errors import CheckpointError
from optimc.plan import LayerReport
from optimc_passes.artifact import Artifact
from optimc_passes.quantize.affine import quantize_affine
from optimc_passes.quantize.awq_search import scales_of
from optimc_passes.quantize.folding import FoldPair, apply_folds, fold_pairs
from optimc_passes.quantize.layer_report import packed_bytes
from optimc_passes.quantize.linears import LinearWeight
from optimc_passes.quantize.scaled_rounding import NO_HEAD, UNDONE, dense_row, foldable, inputs_not_finite, magnitudes
from optimc_passes.quantize.smoothquant import SmoothQuantConfig
from optimc_passes.walk.activations import Activations
from optimc_passes.walk.layered_model import Stage
from optimc_passes.walk.loaded_layer import LoadedLayer
from optimc_passes.walk.walk import Finished, LayerWork
from optimc_passes.weights import Dense, Quantized, Weight

INT8_LARGEST = 127


@dataclass
class _Seen:
    """What the linear layers of one stage read."""

    linears: tuple[LinearWeight, ...]
    largest: NDArray[np.float32]
    """[C], largest |x| of each feature."""
    scales: NDArray[np.float32] | None
    """[C] by which weights are multiplied; None if the stage is not scaled."""
    note: str | None
    seconds: float


class SmoothQuantWork(LayerWork):
    """Finds scales stage by stage, folds them at the layer's end, and rounds if asked to."""

    stream = "original"

    def __init__(self, config: SmoothQuantConfig, artifact: Artifact, chosen: Collection[str]) -> None:
        self._config, self._artifact, self._chosen = config, artifact, chosen
        self._pairs: dict[str, FoldPair] = {}
        self._seen: dict[str, _Seen] = {}
        self._tokens = 0
        """Of the first window."""

    def begin(self, layer: LoadedLayer) -> None:
        """Look for what can be folded."""
        self._pairs = {pair.stage: pair for pair in fold_pairs(layer.module, layer.prefix)}

    def stage(self, layer: LoadedLayer, stage: Stage, inputs: Activations, original: Activations | None) -> None:
        """Find the scales of a stage. Raises CheckpointError if what it reads, or a weight, is not finite."""
        del original  # One stream: the weights as they are.
        linears = tuple(linear for linear in stage.linears if linear.layer in self._chosen)
        if not linears:
            return
        start = time.perf_counter()
        self._tokens = inputs.lengths[0]
        largest = _largest(inputs, linears[0])
        pair = self._pairs.get(stage.name)
        note = foldable(pair, self._artifact.weights)
        scales = None
        if pair is not None and note is None:
            weights = [layer.weight(linear.name) for linear in linears]
            scales = smoothing(largest, weights, self._config.alpha, pair.channels)
        self._seen[stage.name] = _Seen(linears, largest, scales, note, time.perf_counter() - start)

    def end(self, layer: LoadedLayer) -> Finished:
        """Fold, and round or leave it to a later pass."""
        folds = [(self._pairs[stage], seen.scales) for stage, seen in self._seen.items() if seen.scales is not None]
        changed, undone = apply_folds(layer, folds, self._tokens)
        for pair in undone:
            self._seen[pair.stage].note, self._seen[pair.stage].scales = UNDONE, None
        weights: dict[str, Weight] = {name: Dense.of(np.array(layer.weight(name))) for name in changed}
        rows = []
        for seen in self._seen.values():
            largest = float((seen.largest if seen.scales is None else seen.largest / seen.scales).max())
            for linear in seen.linears:
                row = self._row(linear, seen)
                if self._config.rounding == "nearest":
                    weights[linear.name], row = self._rounded(linear, layer.weight(linear.name), largest, row)
                rows.append(row)
        self._seen = {}
        return Finished(weights, tuple(rows))

    def head(self, linear: LinearWeight, weight: NDArray[np.float32], inputs: Activations) -> Finished | None:
        """Round the head as it is."""
        largest = _largest(inputs, linear)
        row = self._row(linear, _Seen((linear,), largest, None, NO_HEAD, 0.0))
        quantized, row = self._rounded(linear, weight, float(largest.max()), row)
        return Finished({linear.name: quantized}, (row,))

    def _rounded(
        self, linear: LinearWeight, weight: NDArray[np.float32], largest: float, row: LayerReport
    ) -> tuple[Quantized, LayerReport]:
        """Round a weight to int8, one scale per row; `largest` is the largest |x| it reads."""
        start = time.perf_counter()
        try:
            codes, scales, _ = quantize_affine(weight, 8, weight.shape[1], symmetric=True)
        except ValueError as error:
            raise CheckpointError(f"{linear.layer}: {error}") from error
        static = self._config.activations == "static"
        quantized = Quantized.of(
            codes,
            scales,
            None,
            bits=8,
            group=weight.shape[1],
            method="smoothquant",
            activation_scale=activation_scale(largest) if static else None,
        )
        norm = float(np.linalg.norm(weight))
        lost = float(np.linalg.norm(quantized.dequantize() - weight))
        changes = {
            "bits": 8,
            "group": weight.shape[1],
            "error": lost / norm if norm else 0.0,
            "bytes_after": packed_bytes(quantized),
            "seconds": row.seconds + time.perf_counter() - start,
        }
        return quantized, row.model_copy(update=changes)

    def _row(self, linear: LinearWeight, seen: _Seen) -> LayerReport:
        return dense_row(linear, self._artifact.weights, seen.seconds / len(seen.linears), seen.note)


def smoothing(
    largest: NDArray[np.float32],
    weights: list[NDArray[np.float32]],
    alpha: float,
    channels: NDArray[np.intp],
) -> NDArray[np.float32]:
    """Return the scales [C] of linear layers [N_i, C] that read one value: max|x| ** alpha / max|w| ** (1 - alpha).

    Features of one channel of what is before them get one scale; scales are finite, positive and lie around 1.
    """
    sizes = np.max([np.abs(weight).max(axis=0) for weight in weights], axis=0)
    return scales_of(largest, sizes, alpha, channels)


def activation_scale(largest: float) -> float:
    """Return the float32 scale under which int8 codes reach `largest`; 1 where nothing was ever seen but 0."""
    scale = np.float32(largest) / np.float32(INT8_LARGEST)
    return float(scale) if scale >= np.finfo(np.float32).tiny else 1.0


def _largest(inputs: Activations, linear: LinearWeight) -> NDArray[np.float32]:
    largest = magnitudes(inputs)[1]
    if not np.isfinite(largest).all():
        raise inputs_not_finite(linear)
    return largest
