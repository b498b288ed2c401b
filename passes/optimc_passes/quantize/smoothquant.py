"""SmoothQuant: weights and activations in 8 bits, with loud channels evened out between the two.

SmoothQuant (arXiv 2211.10438): input channel j of a linear layer is multiplied by s_j = max|x_j|^a / max|w_j|^(1 - a)
in the weight and divided by it in the activations, by the norm or the rows that compute them (`folding`). What is left
to round are activations without the few channels that would otherwise set everybody's scale. Weights get int8 codes
with one scale per row; activations are rounded while the model runs, with one scale per token, or with one static scale
per value that calibration text gives here.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from optimc_passes.artifact import Artifact
from optimc_passes.base import Pass, PassContext, PassResult
from optimc_passes.quantize.config import LayerChoice, describe_selection, not_as_asked, schemes_of
from optimc_passes.quantize.linears import linear_weights
from optimc_passes.quantize.scaled_rounding import row_metrics, scaling_decisions
from optimc_passes.walk.host_bytes import walk_host_bytes
from optimc_passes.walk.structure import structure_problems
from optimc_passes.weights import WeightStore


class SmoothQuantConfig(LayerChoice):
    """How far loudness moves from activations into weights, and how activations are rounded."""

    bits: Literal[8] = 8
    """Bits per code of the weights; activations always have 8."""
    symmetric: Literal[True] = True
    """Products of integers want weights without zero points."""
    group_size: Literal[-1] = -1
    """One scale per row, so that a row's product is one sum of integers."""
    alpha: float = Field(default=0.5, ge=0, le=1)
    """0 leaves all loudness in the activations, 1 moves all of it into the weights."""
    activations: Literal["token", "static"] = "token"
    """`token`: one scale per token while the model runs (`target: {activation_scales: row}`). `static`: one scale per
    value, the largest magnitude on the calibration text; what is larger is cut off."""
    rounding: Literal["nearest", "later"] = "nearest"
    """`nearest` rounds here. `later` leaves the weights dense, only smoothed, for a rounding pass behind this one."""

    @model_validator(mode="after")
    def _static_rounds_here(self) -> SmoothQuantConfig:
        if self.activations == "static" and self.rounding == "later":
            raise ValueError("static activation scales belong to rounded weights: use rounding: nearest")
        return self


class SmoothQuant(Pass[SmoothQuantConfig]):
    """Evens out activations by scaling channels, and rounds weights to int8."""

    name = "smoothquant"
    version = 1
    stage = "weights"
    config_type = SmoothQuantConfig
    uses_calibration = True

    def requires(self, artifact: Artifact) -> list[str]:
        """Return every layer that does not fit the configuration, or cannot be walked."""
        problems = schemes_of(self.config, artifact).selection.problems
        return [*problems, *structure_problems(linear_weights(artifact.checkpoint.config))]

    def host_bytes(self, artifact: Artifact) -> int:
        """Return what a walk needs."""
        return walk_host_bytes(artifact).total

    def run(self, artifact: Artifact, context: PassContext) -> PassResult:
        """Walk the layers on the activations of the weights as they are."""
        from optimc_passes.quantize.smoothquant_walk import SmoothQuantWork
        from optimc_passes.walk.walk import walk_layers

        assert artifact.calibration is not None
        selection, schemes = schemes_of(self.config, artifact)
        rounds = self.config.rounding == "nearest"
        wants_head = rounds and any(linear.is_head for linear in selection.chosen)
        work = SmoothQuantWork(self.config, artifact, frozenset(schemes))
        walked = walk_layers(artifact, work, context, wants_head=wants_head)
        told = ("errors are of the weights themselves: outputs are not computed",) if rounds else ()
        return PassResult(
            artifact.evolve(weights=WeightStore({**artifact.weights, **walked.weights})),
            row_metrics(walked.rows),
            (*describe_selection(selection, self.config.group_size), *scaling_decisions(walked.rows), *told),
            layers=walked.rows,
            calibration_tokens=artifact.calibration.tokens_used,
            resumed_at=walked.resumed_at,
        )

    def ensures(self, before: Artifact, after: Artifact) -> list[str]:
        """Return chosen layers that are not as asked."""
        rounds = self.config.rounding == "nearest"
        return not_as_asked(schemes_of(self.config, before).selection.chosen, after.weights, quantized=rounds)
