"""What AWQ does at each decoder layer of the walk."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from optimc.errors import CheckpointError
from optimc.plan import LayerReport
from optimc_passes.artifact import Artifact
from optimc_passes.choices import Scheme
from optimc_passes.quantize.affine import encode, grid_of, group_range
from optimc_passes.quantize.awq import AwqConfig
from optimc_passes.quantize.awq_search import Scaling, best_scales
from optimc_passes.quantize.clip import best_clip, group_blocks
from optimc_passes.quantize.folding import FoldPair, apply_folds, fold_pairs
from optimc_passes.quantize.layer_report import packed_bytes
from optimc_passes.quantize.linears import LinearWeight, linear_weights
from optimc_passes.quantize.rounding import Round, nearest, output_error
from optimc_passes.quantize.scaled_rounding import (
    NO_GAIN,
    NO_HEAD,
    UNDONE,
    dense_row,
    foldable,
    held_moments,
    inputs_not_finite,
    magnitudes,
)
from optimc_passes.walk.activations import Activations, second_moment
from optimc_passes.walk.host_bytes import walk_host_bytes
from optimc_passes.walk.layered_model import Stage
from optimc_passes.walk.loaded_layer import LoadedLayer
from optimc_passes.walk.walk import Finished, LayerWork
from optimc_passes.weights import Dense, Quantized, Weight


@dataclass
class _Found:
    """What the search found for the linear layers of one stage."""

    linears: tuple[LinearWeight, ...]
    moment: NDArray[np.float32]
    """[C, C] of what they read; of the scaled inputs once the scales are folded."""
    scaling: Scaling | None
    note: str | None
    """Why the stage is not scaled; None if it is."""
    seconds: float


class AwqWork(LayerWork):
    """Searches scales stage by stage, folds them at the layer's end, and rounds if asked to.

    Searches of one layer do not depend on each other: a fold changes neither what other stages compute nor, but for
    float16's rounding of scales, how the rows it scales are rounded.
    """

    stream = "original"

    def __init__(self, config: AwqConfig, artifact: Artifact, schemes: Mapping[str, Scheme]) -> None:
        self._config, self._artifact, self._schemes = config, artifact, schemes
        self._pairs: dict[str, FoldPair] = {}
        self._found: dict[str, _Found] = {}
        self._tokens = 0
        """Of the first window."""
        moments = walk_host_bytes(artifact).moments
        self.working_bytes = moments + held_moments(linear_weights(artifact.checkpoint.config))

    def begin(self, layer: LoadedLayer) -> None:
        """Look for what can be folded."""
        self._pairs = {pair.stage: pair for pair in fold_pairs(layer.module, layer.prefix)}

    def stage(self, layer: LoadedLayer, stage: Stage, inputs: Activations, original: Activations | None) -> None:
        """Search the scales of a stage. Raises CheckpointError if what it reads is not finite."""
        del original  # One stream: the weights as they are.
        linears = tuple(linear for linear in stage.linears if linear.layer in self._schemes)
        if not linears:
            return
        start = time.perf_counter()
        self._tokens = inputs.lengths[0]
        pair = self._pairs.get(stage.name)
        note = foldable(pair, self._artifact.weights)
        moment = _moment(inputs, linears[0])
        scaling = None
        for linear in linears:
            _check_finite(linear, layer.weight(linear.name))
        if pair is not None and note is None:
            scaling = best_scales(
                [layer.weight(linear.name) for linear in linears],
                moment,
                magnitudes(inputs)[0],
                [_rounder(self._schemes[linear.layer]) for linear in linears],
                channels=pair.channels,
                grid=self._config.grid,
                duo=self._config.duo,
            )
            note = NO_GAIN if (scaling.scales == 1).all() else None
        self._found[stage.name] = _Found(linears, moment, scaling, note, time.perf_counter() - start)

    def end(self, layer: LoadedLayer) -> Finished:
        """Fold, and round or leave it to a later pass."""
        folds = [
            (self._pairs[stage], found.scaling.scales)
            for stage, found in self._found.items()
            if found.scaling is not None and found.note is None
        ]
        changed, undone = apply_folds(layer, folds, self._tokens)
        for pair in undone:
            self._found[pair.stage].note = UNDONE
        weights: dict[str, Weight] = {name: Dense.of(np.array(layer.weight(name))) for name in changed}
        rows = []
        for found in self._found.values():
            if self._config.rounding == "nearest" and found.scaling is not None and found.note is None:
                found.moment /= found.scaling.scales[:, None]
                found.moment /= found.scaling.scales
            for linear in found.linears:
                if self._config.rounding == "nearest":
                    weights[linear.name], row = self._rounded(linear, layer.weight(linear.name), found)
                else:
                    row = self._row(linear, found)
                rows.append(row)
        self._found = {}
        return Finished(weights, tuple(rows))

    def head(self, linear: LinearWeight, weight: NDArray[np.float32], inputs: Activations) -> Finished | None:
        """Round the head as it is, within clipped ranges."""
        _check_finite(linear, weight)
        found = _Found((linear,), _moment(inputs, linear), None, NO_HEAD, 0.0)
        quantized, row = self._rounded(linear, weight, found)
        return Finished({linear.name: quantized}, (row,))

    def _rounded(
        self, linear: LinearWeight, weight: NDArray[np.float32], found: _Found
    ) -> tuple[Quantized, LayerReport]:
        """Round a weight to nearest by the second moment of what it reads; return it and its row of the report."""
        start = time.perf_counter()
        scheme = self._schemes[linear.layer]
        assert scheme.bits is not None
        if self._config.clip:
            blocks = group_blocks(found.moment, scheme.group)
            low, high = best_clip(weight, blocks, scheme.bits, scheme.group, symmetric=scheme.symmetric)
        else:
            low, high = group_range(weight, scheme.group)
        scales, zeros = grid_of(low, high, scheme.bits, symmetric=scheme.symmetric)
        codes = encode(weight, scales, zeros, scheme.bits, scheme.group)
        quantized = Quantized.of(codes, scales, zeros, bits=scheme.bits, group=scheme.group, method="awq")
        whole = output_error(weight, found.moment)
        lost = output_error(quantized.dequantize() - weight, found.moment)
        changes = {
            "bits": scheme.bits,
            "group": scheme.group,
            "error": float(np.sqrt(max(lost, 0.0) / whole)) if whole > 0 else 0.0,
            "bytes_after": packed_bytes(quantized),
        }
        row = self._row(linear, found)
        return quantized, row.model_copy(update={**changes, "seconds": row.seconds + time.perf_counter() - start})

    def _row(self, linear: LinearWeight, found: _Found) -> LayerReport:
        seconds = found.seconds / len(found.linears)
        return dense_row(linear, self._artifact.weights, seconds, found.note or _gain(found.scaling))


def _gain(scaling: Scaling | None) -> str | None:
    if scaling is None or scaling.error_unscaled <= 0:
        return None
    return f"scaled: rounding to nearest costs {scaling.error / scaling.error_unscaled:.2f} of what it did"


def _check_finite(linear: LinearWeight, weight: NDArray[np.float32]) -> None:
    if not np.isfinite(weight).all():
        raise CheckpointError(f"{linear.layer}: its weight has elements that are not finite")


def _moment(inputs: Activations, linear: LinearWeight) -> NDArray[np.float32]:
    moment = second_moment(inputs)
    if not np.isfinite(moment).all():
        raise inputs_not_finite(linear)
    return moment


def _rounder(scheme: Scheme) -> Round:
    assert scheme.bits is not None
    return nearest(scheme.bits, scheme.group, symmetric=scheme.symmetric)
