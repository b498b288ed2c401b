"""Round-to-nearest: each linear weight becomes codes with a scale per group. Needs no calibration."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from optimc.errors import CheckpointError
from optimc.plan import LayerReport
from optimc_passes.artifact import Artifact
from optimc_passes.base import Pass, PassContext, PassResult
from optimc_passes.choices import Scheme
from optimc_passes.quantize.affine import AffineCodes, encode, grid_of, quantize_affine
from optimc_passes.quantize.clip import clipped_range
from optimc_passes.quantize.config import (
    LayerChoice,
    Schemes,
    current_weight,
    describe_selection,
    not_as_asked,
    schemes_of,
)
from optimc_passes.quantize.layer_report import packed_bytes, quantized_metrics
from optimc_passes.quantize.linears import LinearWeight, linear_weights
from optimc_passes.weights import Dense, Quantized, Weight, WeightStore


class RtnConfig(LayerChoice):
    """How weights are rounded."""

    clip: Literal["none", "mse"] = "none"
    """`mse` gives up a part of a group's range where the squared error falls: elements beyond it are clamped."""


class Rtn(Pass[RtnConfig]):
    """Quantizes the weights of linear layers, and the input embedding where it is named; all else stays as it is."""

    name = "rtn"
    version = 3
    stage = "weights"
    config_type = RtnConfig

    def requires(self, artifact: Artifact) -> list[str]:
        """Return every layer that does not fit the configuration."""
        return list(self._schemes(artifact).selection.problems)

    def host_bytes(self, artifact: Artifact) -> int:
        """Return what the largest weight needs: float32, scaled steps, their rounding, codes, the error in float64."""
        chosen = self._schemes(artifact).selection.chosen
        return 24 * max((linear.shape[0] * linear.shape[1] for linear in chosen), default=0)

    def run(self, artifact: Artifact, context: PassContext) -> PassResult:
        """Quantize layer by layer; memory holds one layer at a time besides what `context.keep` holds."""
        selection, schemes = self._schemes(artifact)
        changed: dict[str, Weight] = {}
        rows: list[LayerReport] = []
        for done, linear in enumerate(selection.chosen):
            context.progress(done, len(selection.chosen), linear.layer)
            start = time.perf_counter()
            dense = current_weight(linear, artifact.weights)
            assert isinstance(dense, Dense)
            weight = dense.read().astype(np.float32)
            scheme = schemes[linear.layer]
            quantized = self._quantize(linear, weight, scheme)
            rows.append(
                LayerReport(
                    layer=linear.layer,
                    bits=scheme.bits,
                    group=scheme.group,
                    error=_relative_error(weight, quantized),
                    seconds=time.perf_counter() - start,
                    bytes_before=dense.nbytes,
                    bytes_after=packed_bytes(quantized),
                )
            )
            changed[linear.name] = context.keep(linear.name, quantized)
        decisions = describe_selection(selection, self.config.group_size)
        for head in _left_behind(artifact, changed):
            changed[head.name] = context.keep(head.name, artifact.weights[head.source])
            decisions = (*decisions, f"{head.layer} keeps the values of {head.tied_to}, to which it was tied")
        context.progress(len(selection.chosen), len(selection.chosen), "")
        return PassResult(
            artifact.evolve(weights=WeightStore({**artifact.weights, **changed})),
            quantized_metrics(rows, changed, len(selection.skipped)),
            decisions,
            layers=tuple(rows),
        )

    def ensures(self, before: Artifact, after: Artifact) -> list[str]:
        """Return chosen layers that are not quantized as asked."""
        return not_as_asked(self._schemes(before).selection.chosen, after.weights)

    def _schemes(self, artifact: Artifact) -> Schemes:
        return schemes_of(self.config, artifact, has_embedding=True)

    def _quantize(self, linear: LinearWeight, weight: NDArray[np.float32], scheme: Scheme) -> Quantized:
        assert scheme.bits is not None, "layers that stay dense are not chosen"
        try:
            codes, scales, zeros = self._rounded(weight, scheme.bits, scheme)
        except ValueError as error:
            raise CheckpointError(f"{linear.source}: {error}") from error
        return Quantized.of(codes, scales, zeros, bits=scheme.bits, group=scheme.group, method=self.name)

    def _rounded(self, weight: NDArray[np.float32], bits: int, scheme: Scheme) -> AffineCodes:
        if self.config.clip == "none" or not np.isfinite(weight).all():
            return quantize_affine(weight, bits, scheme.group, symmetric=scheme.symmetric)
        low, high = clipped_range(weight, bits, scheme.group, symmetric=scheme.symmetric)
        scales, zeros = grid_of(low, high, bits, symmetric=scheme.symmetric)
        return AffineCodes(encode(weight, scales, zeros, bits, scheme.group), scales, zeros)


def _left_behind(artifact: Artifact, changed: Mapping[str, Weight]) -> list[LinearWeight]:
    """Return the head if the embedding it is tied to changes and it does not."""
    tied = [linear for linear in linear_weights(artifact.checkpoint.config) if linear.tied_to in changed]
    return [linear for linear in tied if linear.name not in changed and linear.name not in artifact.weights]


def _relative_error(weight: NDArray[np.float32], quantized: Quantized) -> float:
    """Frobenius norm of the difference over that of the weight; 0 for a weight of zeros."""
    norm = float(np.linalg.norm(weight.astype(np.float64)))
    return float(np.linalg.norm(weight.astype(np.float64) - quantized.dequantize())) / norm if norm else 0.0
