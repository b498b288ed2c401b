"""The first half of a build: weight passes in order, each taken from the cache if it ran before.

Around a pass: its unfinished work of an earlier build, its memory limit, the figures of what it did to predictions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from optimc.plan import PassReport
from optimc_passes.artifact import Artifact
from optimc_passes.base import Pass, PassContext, PassOutcome
from optimc_passes.cache import ArtifactCache
from optimc_passes.cache_entry import remove_partial
from optimc_passes.host_memory import check_host_memory
from optimc_passes.pipeline_options import PipelineOptions, pass_label
from optimc_passes.quality_meter import QualityMeter
from optimc_passes.verify.finite_weights import check_finite_weights
from optimc_passes.weights import WeightStore


def run_weight_stage(
    passes: Sequence[Pass[Any]], artifact: Artifact, options: PipelineOptions
) -> tuple[Artifact, tuple[PassReport, ...]]:
    """Run the weight passes among `passes` in order; return the last artifact and a report of each.

    Raises ConfigError if one needs more memory than it may use, PassError if one fails, CheckpointError if a weight of
    the checkpoint is not finite.
    """
    stage = _WeightStage(passes, options)
    check_host_memory(passes, artifact, options)
    check_finite_weights(artifact.weights)
    for pass_ in passes:
        if pass_.stage == "weights":
            artifact = stage.run(pass_, artifact)
    return artifact, tuple(stage.reports)


class _WeightStage:
    """One run of the weight passes: the options, and the reports so far."""

    def __init__(self, passes: Sequence[Pass[Any]], options: PipelineOptions) -> None:
        self.reports: list[PassReport] = []
        self._passes, self._options = passes, options
        windows = options.quality_windows
        self._meter = None if windows is None else QualityMeter(windows, options.max_host_bytes)

    def run(self, pass_: Pass[Any], artifact: Artifact) -> Artifact:
        """Run a pass, or take its result from the cache."""
        cache = self._options.cache
        if cache is None:
            outcome = pass_(artifact, self._context(pass_))
            self.reports.append(self._measured(pass_, artifact, outcome))
            return outcome.artifact
        key = pass_.result_key(artifact)
        found = cache.load_weights(key)
        if found is None:
            report = self._compute(cache, key, pass_, artifact)
            found = cache.load_weights(key)
            assert found is not None, f"the cache lost {key} at once"
            # The weights as they read from the cache, the report as it came from the pass.
            found = found._replace(report=report)
        after = artifact.evolve(
            key=key,
            weights=WeightStore({**artifact.weights, **found.weights}),
            choices=artifact.choices if found.choices is None else found.choices,
        )
        self.reports.append(self._measured(pass_, artifact, PassOutcome(after, found.report)))
        return after

    def _compute(self, cache: ArtifactCache, key: str, pass_: Pass[Any], artifact: Artifact) -> PassReport:
        partial = cache.partial(key) if self._options.resumable else None
        with cache.write_weights(key) as writer:
            context = self._context(pass_, keep=writer.keep, partial=partial, scratch=cache.root / "tmp")
            outcome = pass_(artifact, context)
            report = self._measured(pass_, artifact, outcome)
            before = artifact.weights
            changed = {
                name: weight
                for name, weight in outcome.artifact.weights.items()
                if name not in before or before[name] is not weight
            }
            choices = outcome.artifact.choices
            writer.commit(changed, report, None if choices is artifact.choices else choices)
        if partial is not None:
            remove_partial(partial)
        return report

    def _context(self, pass_: Pass[Any], **places: Any) -> PassContext:
        return PassContext(
            tuple(report.name for report in self.reports),
            self._options.progress_of(pass_label(pass_, self._passes)),
            max_host_bytes=self._options.max_host_bytes,
            **places,
        )

    def _measured(self, pass_: Pass[Any], before: Artifact, outcome: PassOutcome) -> PassReport:
        """Return the report of a pass with what it did to the model's predictions, or why that is not known."""
        meter, report, after = self._meter, outcome.report, outcome.artifact
        if meter is None:
            why = self._options.unmeasured
            return report if why is None else _noted(report, f"predictions were not measured: {why}")
        if meter.knows(report):
            assert report.quality is not None
            meter.remember(after, report.quality)
            return report
        obstacle = meter.obstacle(after)
        if obstacle is not None:
            return _noted(report, f"predictions were not measured: {obstacle}")
        progress = self._options.progress_of(f"measure {pass_label(pass_, self._passes)}")
        progress(0, 1, "")
        quality = meter.quality(before, after)
        progress(1, 1, "")
        if not all(math.isfinite(figure) for figure in quality.model_dump().values()):
            # JSON has no such numbers; a model that predicts none is told of in words.
            return _noted(report, f"predictions are no longer numbers on {quality.tokens} tokens of text")
        return report.model_copy(update={"quality": quality})


def _noted(report: PassReport, decision: str) -> PassReport:
    """Return the report with one more decision; a cached one may have it already."""
    if decision in report.decisions:
        return report
    return report.model_copy(update={"decisions": (*report.decisions, decision)})
