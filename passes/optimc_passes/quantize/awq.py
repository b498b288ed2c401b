"""AWQ: channels whose activations are large get finer steps, by scales that what stands before a layer takes back.

Activation-aware weight quantization (arXiv 2306.00978). Per set of linear layers that read one value, a search over
channel scales (`awq_search`) by the layers' output error on the calibration tokens; the scales are folded into the norm
or the rows before (`folding`), and the weights rounded to nearest within ranges clipped by the same measure. With
`rounding: later` the weights stay dense, only scaled, and a pass behind this one rounds them.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from optimc_passes.artifact import Artifact
from optimc_passes.base import Pass, PassContext, PassResult
from optimc_passes.quantize.config import LayerChoice, describe_selection, not_as_asked, schemes_of
from optimc_passes.quantize.linears import linear_weights
from optimc_passes.quantize.scaled_rounding import held_moments, row_metrics, scaling_decisions
from optimc_passes.walk.host_bytes import walk_host_bytes
from optimc_passes.walk.structure import structure_problems
from optimc_passes.weights import WeightStore


class AwqConfig(LayerChoice):
    """How scales are searched, and whether this pass rounds."""

    rounding: Literal["nearest", "later"] = "nearest"
    """`nearest` rounds here. `later` leaves the weights dense, scaled for the bits and group size given here, for a
    rounding pass behind this one."""
    grid: int = Field(default=20, ge=1, le=100)
    """Exponents tried between 0 and 1."""
    duo: bool = True
    """Whether scales that also look at the size of the weights are tried."""
    clip: bool = True
    """Whether ranges that leave out outlying weights are tried; only where this pass rounds."""


class Awq(Pass[AwqConfig]):
    """Scales the input channels of linear layers by what calibration text activates, and rounds the weights."""

    name = "awq"
    version = 1
    stage = "weights"
    config_type = AwqConfig
    uses_calibration = True

    def requires(self, artifact: Artifact) -> list[str]:
        """Return every layer that does not fit the configuration, or cannot be walked."""
        selection = schemes_of(self.config, artifact).selection
        return [*selection.problems, *structure_problems(linear_weights(artifact.checkpoint.config))]

    def host_bytes(self, artifact: Artifact) -> int:
        """Return what a walk needs, and the second moments of a whole decoder layer."""
        return walk_host_bytes(artifact).total + held_moments(linear_weights(artifact.checkpoint.config))

    def run(self, artifact: Artifact, context: PassContext) -> PassResult:
        """Walk the layers on the activations of the weights as they are."""
        from optimc_passes.quantize.awq_walk import AwqWork
        from optimc_passes.walk.walk import walk_layers

        assert artifact.calibration is not None
        selection, schemes = schemes_of(self.config, artifact)
        rounds = self.config.rounding == "nearest"
        heads = [linear for linear in selection.chosen if linear.is_head]
        work = AwqWork(self.config, artifact, schemes)
        walked = walk_layers(artifact, work, context, wants_head=bool(heads) and rounds)
        decisions = [*describe_selection(selection, self.config.group_size), *scaling_decisions(walked.rows)]
        if heads and not rounds:
            decisions.append(f"{heads[0].layer} is left to the pass that rounds: nothing before the head takes scales")
        return PassResult(
            artifact.evolve(weights=WeightStore({**artifact.weights, **walked.weights})),
            row_metrics(walked.rows),
            tuple(decisions),
            layers=walked.rows,
            calibration_tokens=artifact.calibration.tokens_used,
            resumed_at=walked.resumed_at,
        )

    def ensures(self, before: Artifact, after: Artifact) -> list[str]:
        """Return chosen layers that are not as asked."""
        rounds = self.config.rounding == "nearest"
        return not_as_asked(schemes_of(self.config, before).selection.chosen, after.weights, quantized=rounds)
