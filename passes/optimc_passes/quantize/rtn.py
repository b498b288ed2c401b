"""Round-to-nearest: each linear weight becomes codes with a scale per group. Needs no calibration."""

from __future__ import annotations

import re
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator

from optimc.errors import CheckpointError
from optimc_passes.artifact import Artifact
from optimc_passes.base import Metrics, Pass, PassConfig, PassContext, PassResult
from optimc_passes.quantize.affine import quantize_affine
from optimc_passes.quantize.linears import LinearWeight, linear_weights
from optimc_passes.quantize.selection import EVERY_LAYER, HEAD_PATTERN, RaggedPolicy, Selection, name_layers, select
from optimc_passes.weights import Dense, Quantized, WeightStore


class RtnConfig(PassConfig):
    """How weights are rounded."""

    bits: Literal[4, 8] = 4
    """Bits per code."""
    symmetric: bool = False
    """Whether every zero point is the middle code; asymmetric groups store one each."""
    group_size: int = Field(default=64, ge=-1, le=1 << 30)
    """Columns that share a scale; -1 means the whole row."""
    ragged: RaggedPolicy = "error"
    """What to do where group_size does not divide a layer's columns: `error` refuses, naming every such layer;
    `ragged` makes the last group of a row smaller; `skip` leaves the layer dense."""
    only: tuple[str, ...] = Field(default=(EVERY_LAYER,), min_length=1, strict=False)
    """Layers this pass is about, so that a recipe can round some with other options than the rest: patterns as in
    `ignore`, which takes its share out of them."""
    ignore: tuple[str, ...] = Field(default=(HEAD_PATTERN,), strict=False)
    """Layers left as they are: globs over module names, or regular expressions after `re:`. `lm_head` means the output
    head whatever its name; a tied head that is not ignored is quantized apart from its embedding, which stays as it
    is."""

    @field_validator("group_size")
    @classmethod
    def _some_columns(cls, value: int) -> int:
        if value == 0:
            raise ValueError("must be positive, or -1 for the whole row")
        return value

    @field_validator("only", "ignore")
    @classmethod
    def _patterns_compile(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            if pattern.startswith("re:"):
                try:
                    re.compile(pattern[3:])
                except re.error as error:
                    raise ValueError(f"'{pattern}' is not a regular expression: {error}") from error
        return patterns


class Rtn(Pass[RtnConfig]):
    """Quantizes the weights of linear layers; embeddings, norms and biases stay as they are."""

    name = "rtn"
    version = 2
    stage = "weights"
    config_type = RtnConfig

    def requires(self, artifact: Artifact) -> list[str]:
        """Return every layer that does not fit the configuration."""
        selection = self._select(artifact)
        present = [linear for linear in selection.chosen if linear.source in artifact.weights]
        problems = list(selection.problems)
        problems += [
            f"{linear.source} is not in the checkpoint" for linear in selection.chosen if linear not in present
        ]
        rounded = [linear for linear in present if isinstance(_current(linear, artifact.weights), Quantized)]
        if rounded:
            problems.append(
                f"quantized already: {name_layers(rounded)}; one pass can quantize a layer, only and ignore say which"
            )
        return problems

    def run(self, artifact: Artifact, context: PassContext) -> PassResult:
        """Quantize layer by layer; memory holds one layer at a time besides what `context.keep` holds."""
        selection = self._select(artifact)
        changed: dict[str, Dense | Quantized] = {}
        errors: dict[str, float] = {}
        bytes_before = bytes_after = 0
        for done, linear in enumerate(selection.chosen):
            context.progress(done, len(selection.chosen), linear.layer)
            dense = _current(linear, artifact.weights)
            assert isinstance(dense, Dense)
            weight = dense.read().astype(np.float32)
            quantized = self._quantize(linear, weight)
            errors[linear.layer] = _relative_error(weight, quantized)
            bytes_before += dense.nbytes
            bytes_after += packed_bytes(quantized)
            changed[linear.name] = context.keep(linear.name, quantized)
        context.progress(len(selection.chosen), len(selection.chosen), "")
        store = WeightStore({**artifact.weights, **changed})
        metrics = _metrics(errors, bytes_before, bytes_after, selection)
        return PassResult(artifact.evolve(weights=store), metrics, self._decisions(selection))

    def ensures(self, before: Artifact, after: Artifact) -> list[str]:
        """Return chosen layers that are not quantized as asked."""
        return [
            f"{linear.layer} is not quantized"
            for linear in self._select(before).chosen
            if not isinstance(after.weights[linear.name], Quantized)
        ]

    def _select(self, artifact: Artifact) -> Selection:
        config = self.config
        return select(
            linear_weights(artifact.checkpoint.config),
            only=config.only,
            ignore=config.ignore,
            group_size=config.group_size,
            ragged=config.ragged,
        )

    def _quantize(self, linear: LinearWeight, weight: NDArray[np.float32]) -> Quantized:
        bits, columns = self.config.bits, linear.shape[1]
        group = columns if self.config.group_size == -1 else min(self.config.group_size, columns)
        try:
            codes, scales, zeros = quantize_affine(weight, bits, group, symmetric=self.config.symmetric)
        except ValueError as error:
            raise CheckpointError(f"{linear.source}: {error}") from error
        return Quantized(
            codes=Dense.of(codes),
            scales=Dense.of(scales),
            zeros=None if zeros is None else Dense.of(zeros),
            bits=bits,
            group=group,
            method=self.name,
        )

    def _decisions(self, selection: Selection) -> tuple[str, ...]:
        group = self.config.group_size
        left = [f"{linear.layer} is left as it is: ignored" for linear in selection.ignored]
        left += [
            f"{linear.layer} stays dense: {linear.shape[1]} columns not divisible by group_size {group}"
            for linear in selection.skipped
        ]
        left += [
            f"{linear.layer} is quantized apart from {linear.tied_to}, to which it was tied; lookups read the original"
            for linear in selection.chosen
            if linear.tied_to is not None
        ]
        return tuple(left)


def packed_bytes(weight: Quantized) -> int:
    """Bytes of a quantized weight as it is served: codes and zero points packed, float32 scales, int32 permutation."""
    zeros = 0 if weight.zeros is None else int(np.prod(weight.zeros.shape))
    code_bits = (int(np.prod(weight.shape)) + zeros) * weight.bits
    return (code_bits + 7) // 8 + weight.scales.nbytes + (weight.permutation.nbytes if weight.permutation else 0)


def _current(linear: LinearWeight, weights: WeightStore) -> Dense | Quantized:
    """Return the layer's weight as it is now: its own if it has been given one, else the one it is tied to."""
    return weights[linear.name] if linear.name in weights else weights[linear.source]


def _relative_error(weight: NDArray[np.float32], quantized: Quantized) -> float:
    """Frobenius norm of the difference over that of the weight; 0 for a weight of zeros."""
    norm = float(np.linalg.norm(weight.astype(np.float64)))
    return float(np.linalg.norm(weight.astype(np.float64) - quantized.dequantize())) / norm if norm else 0.0


def _metrics(errors: dict[str, float], bytes_before: int, bytes_after: int, selection: Selection) -> Metrics:
    worst = max(errors, key=errors.__getitem__)
    return {
        "layers": len(errors),
        "skipped": len(selection.skipped),
        "bytes_before": bytes_before,
        "bytes_after": bytes_after,
        "relative_error_mean": sum(errors.values()) / len(errors),
        "relative_error_max": errors[worst],
        "worst_layer": worst,
        **{f"relative_error.{layer}": error for layer, error in errors.items()},
    }
