"""What GPTQ does at each layer of a walk: sum second moments, solve, and let the layer go on with rounded weights."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from optimc.errors import CheckpointError
from optimc.plan import LayerReport
from optimc_passes.choices import Scheme
from optimc_passes.quantize.config import current_weight
from optimc_passes.quantize.gptq_solver import Factor, Solved, factorize, solve
from optimc_passes.quantize.layer_report import packed_bytes, weight_bytes
from optimc_passes.quantize.linears import LinearWeight
from optimc_passes.walk.activations import Activations, second_moment
from optimc_passes.walk.layered_model import Stage
from optimc_passes.walk.loaded_layer import LoadedLayer
from optimc_passes.walk.walk import Finished, LayerWork, Streams
from optimc_passes.weights import Quantized, Weight

if TYPE_CHECKING:
    from optimc_passes.quantize.gptq import GptqConfig

_ROWS = 8192
"""Rows solved at a time: the head has as many as the vocabulary."""


class _Inputs(NamedTuple):
    """What is known about the inputs of some linear layers."""

    moment: torch.Tensor
    cross: torch.Tensor | None
    factor: Factor | None
    nearest: str | None


class GptqWork(LayerWork):
    """Quantizes the layers that have a scheme."""

    stream: ClassVar[Streams] = "quantized"

    def __init__(self, config: GptqConfig, schemes: Mapping[str, Scheme], weights: Mapping[str, Weight]) -> None:
        self._config, self._schemes, self._weights = config, schemes, weights
        self._finished: dict[str, Weight] = {}
        self._rows: list[LayerReport] = []

    def begin(self, layer: LoadedLayer) -> None:  # noqa: ARG002 - the signature is the walk's
        """Start a layer's results."""
        self._finished, self._rows = {}, []

    def stage(self, layer: LoadedLayer, stage: Stage, inputs: Activations, original: Activations | None) -> None:
        """Quantize the linears that read `inputs`: those of one scheme stacked, as their rows do not depend on others.

        Raises CheckpointError if a weight is not finite.
        """
        by_scheme: dict[Scheme, list[LinearWeight]] = {}
        for linear in stage.linears:
            if linear.layer in self._schemes:
                by_scheme.setdefault(self._schemes[linear.layer], []).append(linear)
        if not by_scheme:
            return
        known = self._look_at(inputs, original)
        for scheme, linears in by_scheme.items():
            start = time.perf_counter()
            stacked = np.concatenate([layer.weight(linear.name) for linear in linears])
            solved = self._solve(stacked, known, scheme, linears[0].layer)
            seconds = (time.perf_counter() - start) / len(linears)
            first = 0
            for linear in linears:
                rows = slice(first, first + linear.shape[0])
                first = rows.stop
                self._finish(linear, _rows_of(solved, rows), scheme, seconds)
                quantized = self._finished[linear.name]
                assert isinstance(quantized, Quantized)
                layer.set_weight(linear.name, quantized.dequantize())

    def end(self, layer: LoadedLayer) -> Finished:  # noqa: ARG002 - the signature is the walk's
        """Return the layer's codes."""
        return Finished(self._finished, tuple(self._rows))

    def head(self, linear: LinearWeight, weight: NDArray[np.float32], inputs: Activations) -> Finished:
        """Quantize the head on what it reads."""
        self._finished, self._rows = {}, []
        start = time.perf_counter()
        scheme = self._schemes[linear.layer]
        solved = self._solve(weight, self._look_at(inputs, None), scheme, linear.layer)
        self._finish(linear, solved, scheme, time.perf_counter() - start)
        return Finished(self._finished, tuple(self._rows))

    def _look_at(self, inputs: Activations, original: Activations | None) -> _Inputs:
        moment = torch.from_numpy(second_moment(inputs))
        cross = None if original is None else torch.from_numpy(second_moment(original, inputs))
        if inputs.tokens < 2:
            return _Inputs(moment, cross, None, f"{inputs.tokens} calibration token says nothing about its inputs")
        factor = factorize(moment, damping=self._config.damping, act_order=self._config.act_order)
        return _Inputs(moment, cross, factor, None)

    def _solve(self, weight: NDArray[np.float32], known: _Inputs, scheme: Scheme, where: str) -> Solved:
        assert scheme.bits is not None, "layers that stay dense have no part here"
        parts = []
        for begin in range(0, len(weight), _ROWS):
            try:
                part = solve(
                    torch.tensor(weight[begin : begin + _ROWS]),
                    known.moment,
                    known.factor,
                    bits=scheme.bits,
                    group=scheme.group,
                    symmetric=scheme.symmetric,
                    clip=self._config.clip == "mse",
                    sweeps=self._config.sweeps,
                    refit=self._config.refit,
                    cross=known.cross,
                    nearest=known.nearest,
                )
            except ValueError as error:
                raise CheckpointError(f"{where}: {error}") from error
            parts.append(part)
        return parts[0] if len(parts) == 1 else _joined(parts)

    def _finish(self, linear: LinearWeight, solved: Solved, scheme: Scheme, seconds: float) -> None:
        assert scheme.bits is not None
        quantized = Quantized.of(
            solved.codes, solved.scales, solved.zeros, bits=scheme.bits, group=scheme.group, method="gptq"
        )
        norm = float(solved.norms.sum())
        self._finished[linear.name] = quantized
        self._rows.append(
            LayerReport(
                layer=linear.layer,
                bits=scheme.bits,
                group=scheme.group,
                error=float(np.sqrt(solved.errors.sum() / norm)) if norm > 0 else 0.0,
                damping=solved.damping,
                fallback=solved.fallback,
                seconds=seconds,
                bytes_before=weight_bytes(current_weight(linear, self._weights)),
                bytes_after=packed_bytes(quantized),
                note=_note(solved),
            )
        )


class GptaqWork(GptqWork):
    """Knows the original model's inputs beside those that rounding left."""

    stream: ClassVar[Streams] = "both"


def make_work(config: GptqConfig, schemes: Mapping[str, Scheme], weights: Mapping[str, Weight]) -> GptqWork:
    """Return the work that a configuration asks for."""
    return (GptaqWork if config.gptaq else GptqWork)(config, schemes, weights)


def _note(solved: Solved) -> str | None:
    """Say how many rows were better off rounded to nearest; nothing where all were, which has its own reason."""
    count = int(solved.nearest.sum())
    if count == 0 or solved.fallback is not None:
        return None
    return f"{count} of {len(solved.nearest)} rows are rounded to nearest: it costs them less"


def _rows_of(solved: Solved, rows: slice) -> Solved:
    return solved._replace(
        codes=solved.codes[rows],
        scales=solved.scales[rows],
        zeros=None if solved.zeros is None else solved.zeros[rows],
        errors=solved.errors[rows],
        norms=solved.norms[rows],
        nearest=solved.nearest[rows],
    )


def _joined(parts: list[Solved]) -> Solved:
    zeros = [part.zeros for part in parts if part.zeros is not None]
    return parts[0]._replace(
        codes=np.concatenate([part.codes for part in parts]),
        scales=np.concatenate([part.scales for part in parts]),
        zeros=np.concatenate(zeros) if zeros else None,
        errors=np.concatenate([part.errors for part in parts]),
        norms=np.concatenate([part.norms for part in parts]),
        nearest=np.concatenate([part.nearest for part in parts]),
    )
