"""GPTQ: rounding that makes up for itself on calibration text, layer after layer. arXiv 2210.17323."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from optimc_passes.artifact import Artifact
from optimc_passes.base import Pass, PassContext, PassResult
from optimc_passes.quantize.config import LayerChoice, Schemes, describe_selection, not_as_asked, schemes_of
from optimc_passes.quantize.layer_report import quantized_metrics
from optimc_passes.quantize.linears import linear_weights
from optimc_passes.walk.host_bytes import walk_host_bytes
from optimc_passes.walk.structure import structure_problems
from optimc_passes.weights import WeightStore


class GptqConfig(LayerChoice):
    """How weights are rounded."""

    damping: float = Field(default=0.01, gt=0, le=1, strict=False)
    """What is added to the diagonal of a layer's second moment, as a fraction of its mean; raised tenfold up to four
    times where that is not enough."""
    act_order: bool = True
    """Round columns with large inputs first, while the others can still make up for them. Groups are those of the
    source's column order either way, so nothing is reordered when the model is served."""
    clip: Literal["none", "mse"] = "none"
    """`mse` gives up a part of a group's range where the squared error, weighted by the inputs' mean squares, falls."""
    sweeps: int = Field(default=1, ge=0, le=10)
    """How often all columns are gone over again afterwards, each moved to the code that is best given all others."""
    refit: bool = True
    """Fit scales to the codes by least squares, before each sweep and at the end."""
    gptaq: bool = False
    """Aim at what the original layer makes of the original inputs, not of those that earlier rounding left (GPTAQ,
    arXiv 2504.02692)."""


class Gptq(Pass[GptqConfig]):
    """Quantizes linear layers one decoder layer at a time, each on the outputs of the quantized ones before it."""

    name = "gptq"
    version = 1
    stage = "weights"
    config_type = GptqConfig
    uses_calibration = True

    def requires(self, artifact: Artifact) -> list[str]:
        """Return every layer that does not fit the configuration, and what keeps the model from being walked."""
        problems = structure_problems(linear_weights(artifact.checkpoint.config))
        return [*self._schemes(artifact).selection.problems, *problems]

    def host_bytes(self, artifact: Artifact) -> int:
        """Return what the largest layer, its second moments and the activations need."""
        return walk_host_bytes(artifact, streams=2 if self.config.gptaq else 1).total

    def run(self, artifact: Artifact, context: PassContext) -> PassResult:
        """Walk through the layers; memory holds one at a time besides what `context.keep` holds."""
        from optimc_passes.quantize.gptq_work import make_work
        from optimc_passes.walk.walk import walk_layers

        selection, schemes = self._schemes(artifact)
        work = make_work(self.config, schemes, artifact.weights)
        wants_head = any(linear.is_head for linear in selection.chosen)
        walked = walk_layers(artifact, work, context, wants_head=wants_head)
        assert artifact.calibration is not None
        fell_back = [f"{row.layer} is rounded to nearest: {row.fallback}" for row in walked.rows if row.fallback]
        return PassResult(
            artifact.evolve(weights=WeightStore({**artifact.weights, **walked.weights})),
            quantized_metrics(walked.rows, walked.weights, len(selection.skipped)),
            (*describe_selection(selection, self.config.group_size), *fell_back),
            layers=walked.rows,
            calibration_tokens=artifact.calibration.tokens_used,
            resumed_at=walked.resumed_at,
        )

    def ensures(self, before: Artifact, after: Artifact) -> list[str]:
        """Return chosen layers that are not quantized as asked."""
        return not_as_asked(self._schemes(before).selection.chosen, after.weights)

    def _schemes(self, artifact: Artifact) -> Schemes:
        return schemes_of(self.config, artifact)
