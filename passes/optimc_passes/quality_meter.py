"""What each weight pass does to a model's predictions: perplexity and KL divergence before and after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from optimc.plan import PassQuality, PassReport
from optimc_passes.artifact import Artifact
from optimc_passes.quantize.linears import linear_weights
from optimc_passes.walk.structure import structure_problems

if TYPE_CHECKING:
    from optimc_passes.walk.quality import QualityProbe


class QualityMeter:
    """Measures on the same windows after every pass; what came out after one pass is what the next began with.

    Weights are measured as they are in the store, activations in float32: a target that rounds activations or keys and
    values adds to it.
    """

    def __init__(self, windows: NDArray[np.int32], max_host_bytes: int | None) -> None:
        self._windows, self._max_host_bytes = windows, max_host_bytes
        self._probe: QualityProbe | None = None
        self._last: tuple[str, tuple[float, float]] | None = None

    @property
    def predictions(self) -> int:
        """How many predictions the figures are means over."""
        return len(self._windows) * (len(self._windows[0]) - 1)

    def obstacle(self, artifact: Artifact) -> str | None:
        """Return why the model cannot be measured, or None."""
        problems = structure_problems(linear_weights(artifact.checkpoint.config))
        return problems[0] if problems else None

    def knows(self, report: PassReport) -> bool:
        """Whether a report has figures of as many predictions."""
        return report.quality is not None and report.quality.tokens == self.predictions

    def quality(self, before: Artifact, after: Artifact) -> PassQuality:
        """Return the figures of the pass between two artifacts."""
        perplexity_before, kl_before = self._figures(before)
        perplexity_after, kl_after = self._figures(after)
        return PassQuality(
            perplexity_before=perplexity_before,
            perplexity_after=perplexity_after,
            kl_before=kl_before,
            kl_after=kl_after,
            tokens=self.predictions,
        )

    def remember(self, after: Artifact, quality: PassQuality) -> None:
        """Take over figures measured by an earlier build."""
        self._last = after.key, (quality.perplexity_after, quality.kl_after)

    def _figures(self, artifact: Artifact) -> tuple[float, float]:
        if self._last is not None and self._last[0] == artifact.key:
            return self._last[1]
        if self._probe is None:
            from optimc_passes.walk.budget import Budget
            from optimc_passes.walk.quality import QualityProbe

            budget = Budget.of_process(self._max_host_bytes)
            self._probe = QualityProbe(artifact.checkpoint, self._windows, scratch=None, budget=budget)
        figures = self._probe.measure(artifact.weights)
        self._last = artifact.key, figures
        return figures
