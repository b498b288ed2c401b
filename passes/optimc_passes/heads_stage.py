"""The last part of a build: heads for the finished model, taken from the cache if they were trained before."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from optimc.plan import PassReport
from optimc_passes.artifact import Artifact, derive_key
from optimc_passes.base import Pass, PassContext
from optimc_passes.cache import ArtifactCache, StoredWeights
from optimc_passes.cache_entry import remove_partial, scratch_folder
from optimc_passes.heads.heads import Heads
from optimc_passes.heads.target_model import ModelOpener, TargetModel
from optimc_passes.pipeline_options import PipelineOptions, pass_label


def run_heads_stage(
    passes: Sequence[Pass[Any]], artifact: Artifact, options: PipelineOptions, done: tuple[str, ...]
) -> tuple[Artifact, tuple[PassReport, ...]]:
    """Run the passes among `passes` that add heads; return the last artifact and a report of each.

    Heads follow from hidden states, and those from how the target computes: the artifact's key says so from here on.
    """
    chosen = [pass_ for pass_ in passes if pass_.stage == "heads"]
    if not chosen:
        return artifact, ()
    stage = _HeadsStage(passes, options, done)
    artifact = artifact.evolve(key=derive_key(artifact.key, options.models.key if options.models else None))
    for pass_ in chosen:
        artifact = stage.run(pass_, artifact)
    return artifact, tuple(stage.reports)


class _HeadsStage:
    """One run of the passes that add heads."""

    def __init__(self, passes: Sequence[Pass[Any]], options: PipelineOptions, done: tuple[str, ...]) -> None:
        self.reports: list[PassReport] = []
        self._passes, self._options, self._done = passes, options, done

    def run(self, pass_: Pass[Any], artifact: Artifact) -> Artifact:
        """Run a pass, or take its heads from the cache."""
        cache = self._options.cache
        if cache is None:
            with tempfile.TemporaryDirectory() as scratch:
                outcome = pass_(artifact, self._context(pass_, scratch=Path(scratch)))
            self.reports.append(outcome.report)
            return outcome.artifact
        key = pass_.result_key(artifact)
        found = cache.load_weights(key)
        if found is None or found.heads is None:
            report = self._compute(cache, key, pass_, artifact)
            found = cache.load_weights(key)
            assert found is not None, f"the cache lost {key} at once"
            found = found._replace(report=report)
        self.reports.append(found.report)
        return artifact.evolve(key=key, heads=_heads(found))

    def _compute(self, cache: ArtifactCache, key: str, pass_: Pass[Any], artifact: Artifact) -> PassReport:
        partial = cache.partial(key) if self._options.resumable else None
        with scratch_folder(cache.root) as scratch, cache.write_weights(key) as writer:
            outcome = pass_(artifact, self._context(pass_, partial=partial, scratch=scratch))
            heads = outcome.artifact.heads
            assert heads is not None, "the base class refuses passes that return none"
            writer.commit(heads.weights, outcome.report, heads=heads.info)
        if partial is not None:
            remove_partial(partial)
        return outcome.report

    def _context(self, pass_: Pass[Any], *, scratch: Path, partial: Path | None = None) -> PassContext:
        models = self._options.models
        return PassContext(
            (*self._done, *(report.name for report in self.reports)),
            self._options.progress_of(pass_label(pass_, self._passes)),
            partial=partial,
            scratch=scratch,
            max_host_bytes=self._options.max_host_bytes,
            open_model=None if models is None else _Opened(models, scratch),
        )


class _Opened:
    """Opens the model of a build, with its files below the pass's scratch folder."""

    def __init__(self, models: ModelOpener, scratch: Path) -> None:
        self._models, self._scratch = models, scratch

    @contextmanager
    def __call__(self, artifact: Artifact) -> Iterator[TargetModel]:
        with self._models.open(artifact, self._scratch) as model:
            yield model


def _heads(found: StoredWeights) -> Heads:
    assert found.heads is not None, "an entry of the heads stage"
    return Heads(found.heads, found.weights)
