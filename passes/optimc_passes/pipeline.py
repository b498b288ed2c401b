"""From a checkpoint to a finished graph: weight passes, then the graph with the weights attached, then graph passes.

    artifact ─ weight pass ─ … ─ export ─ attach ─ verify ─ graph pass ─ verify ─ … ─► artifact with graph

Every arrow into a pass is a look into the cache first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from optimc.errors import ConfigError, Fault
from optimc.plan import GraphReport, PassReport
from optimc.progress import Progress
from optimc_passes.artifact import Artifact, derive_key
from optimc_passes.base import Pass, PassContext, PassOutcome
from optimc_passes.cache import ArtifactCache
from optimc_passes.choices import KV_PREFIX
from optimc_passes.graph.attach import attach_weights
from optimc_passes.graph.dump import GraphDump
from optimc_passes.graph.exported import Exported
from optimc_passes.graph.figures import GraphFigures, with_figures
from optimc_passes.quantize.linears import linear_weights
from optimc_passes.verify import GraphVerifier, VerifyLevel
from optimc_passes.verify.finite_weights import check_finite_weights
from optimc_passes.verify.probe import Probe
from optimc_passes.weights import WeightStore


@dataclass(frozen=True)
class GraphSource:
    """Where the graph without weights comes from."""

    key: str
    """Hash of everything the export depends on: the model's config, the frontend's version, its options."""
    export: Callable[[], Exported]


@dataclass(frozen=True)
class PipelineOptions:
    """How the passes are run; nothing here changes the result."""

    cache: ArtifactCache | None = None
    verify: VerifyLevel = "numeric"
    dump_graph: Path | None = None
    """Folder that receives the graph after each phase, as text and as ONNX without weights."""
    on_progress: Callable[[str, int, int, str], None] | None = None
    """Called with the step's name, done, total and what the current piece of work is about."""
    max_host_bytes: int | None = None
    """Most memory the process may have resident; passes that need more are refused before the first runs."""
    quality_windows: NDArray[np.int32] | None = None
    """Windows [W, T] of text on which each weight pass is measured; None: none is."""


@dataclass(frozen=True)
class PipelineResult:
    """The last artifact, with its graph, one report per pass in order, and one on the graph's way."""

    artifact: Artifact
    reports: tuple[PassReport, ...]
    graph: GraphReport


def check_order(passes: Sequence[Pass[Any] | type[Pass[Any]]]) -> list[tuple[int, str]]:
    """Return position and message for every weight pass that comes after a graph pass."""
    misplaced = []
    first_graph_pass: str | None = None
    for index, pass_ in enumerate(passes):
        if pass_.stage == "graph":
            first_graph_pass = first_graph_pass or pass_.name
        elif first_graph_pass is not None:
            misplaced.append((index, f"{pass_.name} changes weights and must come before {first_graph_pass}"))
    return misplaced


def run_pipeline(
    passes: Sequence[Pass[Any]], artifact: Artifact, source: GraphSource, options: PipelineOptions | None = None
) -> PipelineResult:
    """Run the passes in order.

    Raises ConfigError if their order cannot be, PassError if one fails, VerifyError if a graph is wrong after one,
    CheckpointError if weights and exported graph do not fit together, or a weight is not finite.
    """
    faults = [Fault(f"passes[{index}]", message) for index, message in check_order(passes)]
    if faults:
        raise ConfigError("passes", faults)
    options = options or PipelineOptions()
    artifact, reports = run_weight_stage(passes, artifact, options)
    run = _Run(passes, options, reports)
    exported, export_seconds = run.export(source)
    start = time.perf_counter()
    artifact = run.attach(artifact, exported.model, source.key)
    attached_nodes = _num_nodes(artifact)
    graph_passes = [pass_ for pass_ in passes if pass_.stage == "graph"]
    for pass_ in graph_passes:
        artifact = run.graph_pass(pass_, artifact)
    if not graph_passes:
        run.check_finite(artifact)
    report = GraphReport(
        exported_nodes=exported.raw_nodes,
        cleaned_nodes=exported.model.graph.num_nodes(),
        attached_nodes=attached_nodes,
        fused_nodes=_num_nodes(artifact),
        export_seconds=export_seconds,
        graph_seconds=time.perf_counter() - start,
        frontend=dict(exported.rewrites),
    )
    return PipelineResult(artifact, tuple(run.reports), report)


def run_weight_stage(
    passes: Sequence[Pass[Any]], artifact: Artifact, options: PipelineOptions
) -> tuple[Artifact, tuple[PassReport, ...]]:
    """Run the weight passes among `passes` in order; return the last artifact and a report of each.

    Raises PassError if one fails, CheckpointError if a weight of the checkpoint is not finite.
    """
    check_finite_weights(artifact.weights)
    run = _Run(passes, options)
    for pass_ in passes:
        if pass_.stage == "weights":
            artifact = run.weight_pass(pass_, artifact)
    return artifact, tuple(run.reports)


class _Run:
    """One run of a pipeline: the passes, the options, and the reports so far."""

    def __init__(self, passes: Sequence[Pass[Any]], options: PipelineOptions, done: Sequence[PassReport] = ()) -> None:
        self.passes = passes
        self.options = options
        self.reports = list(done)
        self._verifier: GraphVerifier | None = None
        self._dump = GraphDump(options.dump_graph)

    @property
    def done(self) -> tuple[str, ...]:
        return tuple(report.name for report in self.reports)

    def weight_pass(self, pass_: Pass[Any], artifact: Artifact) -> Artifact:
        """Run a weight pass, or take its result from the cache."""
        cache = self.options.cache
        if cache is None:
            outcome = pass_(artifact, PassContext(self.done, self._progress(self._label(pass_))))
            self.reports.append(outcome.report)
            return outcome.artifact
        key = pass_.result_key(artifact)
        found = cache.load_weights(key)
        if found is None:
            fresh = self._compute_weights(cache, key, pass_, artifact)
            found = cache.load_weights(key)
            assert found is not None, f"the cache lost {key} at once"
            # The weights as they read from the cache, the report as it came from the pass.
            found = found._replace(report=fresh.report)
        self.reports.append(found.report)
        return artifact.evolve(
            key=key,
            weights=WeightStore({**artifact.weights, **found.weights}),
            choices=artifact.choices if found.choices is None else found.choices,
        )

    def export(self, source: GraphSource) -> tuple[Exported, float]:
        """Return the graph without weights, exported now or before, and the seconds its export took."""
        cache = self.options.cache
        found = cache.load_export(source.key) if cache else None
        if found is None:
            self._progress("export")(0, 1, "")
            start = time.perf_counter()
            exported = source.export()
            found = exported, time.perf_counter() - start
            self._progress("export")(1, 1, "")
            if cache is not None:
                cache.save_export(source.key, *found)
        exported, seconds = found
        if exported.raw is not None:
            self._dump.add("exported", exported.raw)
        else:
            self._dump.skip_export("exported")
        self._dump.add("cleaned", exported.model)
        return exported, seconds

    def attach(self, artifact: Artifact, exported: ir.Model, source_key: str) -> Artifact:
        """Bind the weights and accept the result as the reference of the graph passes."""
        weights = WeightStore({n: w for n, w in artifact.weights.items() if not n.startswith(KV_PREFIX)})
        added = [name for name in weights if name not in artifact.checkpoint.weights]
        tied = {}
        if added:
            linears = linear_weights(artifact.checkpoint.config)
            tied = {linear.name: linear.tied_to for linear in linears if linear.tied_to and linear.name in added}
        graph = attach_weights(exported, weights, tied=tied)
        attached = artifact.evolve(key=derive_key(artifact.key, source_key), graph=graph)
        self._verifier = GraphVerifier(self.options.verify, _probe(artifact))
        self._verifier.check_rules("attach", self.done, graph)
        self._dump.add("attached", graph)
        return attached

    def check_finite(self, artifact: Artifact) -> None:
        """Run the attached graph once where no pass will be compared with it: its logits must at least be numbers."""
        assert self._verifier is not None
        assert artifact.graph is not None
        self._verifier.check_finite("attach", self.done, artifact.graph)

    def graph_pass(self, pass_: Pass[Any], artifact: Artifact) -> Artifact:
        """Run a graph pass and verify its result, or take both from the cache."""
        key = pass_.result_key(artifact)
        # A graph that was verified less does not stand in for one that was verified more.
        entry = derive_key(key, self.options.verify)
        cache = self.options.cache
        found = cache.load_graph(entry, artifact.weights) if cache else None
        if found is not None:
            outcome = PassOutcome(artifact.evolve(key=key, graph=found[0]), found[1])
        else:
            outcome = self._verified(pass_, artifact)
            if cache is not None:
                assert outcome.artifact.graph is not None
                cache.save_graph(entry, outcome.artifact.graph, outcome.report)
        assert outcome.artifact.graph is not None
        self.reports.append(outcome.report)
        self._dump.add(pass_.name, outcome.artifact.graph)
        return outcome.artifact

    def _compute_weights(self, cache: ArtifactCache, key: str, pass_: Pass[Any], artifact: Artifact) -> PassOutcome:
        with cache.write_weights(key) as writer:
            outcome = pass_(artifact, PassContext(self.done, self._progress(self._label(pass_)), writer.keep))
            before = artifact.weights
            changed = {
                name: weight
                for name, weight in outcome.artifact.weights.items()
                if name not in before or before[name] is not weight
            }
            choices = outcome.artifact.choices
            writer.commit(changed, outcome.report, None if choices is artifact.choices else choices)
        return outcome

    def _verified(self, pass_: Pass[Any], artifact: Artifact) -> PassOutcome:
        """Run a graph pass; compare its graph with the one before it."""
        assert self._verifier is not None
        before = artifact.graph
        outcome = pass_(artifact, PassContext(self.done, self._progress(self._label(pass_))))
        after = outcome.artifact.graph
        assert before is not None
        assert after is not None
        error = self._verifier.check(pass_.name, self.done, before, after)
        fusion = with_figures(outcome.report.fusion, GraphFigures.of(before), GraphFigures.of(after), error)
        metrics = outcome.report.metrics
        if error is not None:
            metrics = {**metrics, "verify_relative_error": error}
        report = outcome.report.model_copy(update={"metrics": metrics, "fusion": fusion})
        return PassOutcome(outcome.artifact, report)

    def _label(self, pass_: Pass[Any]) -> str:
        """Return the pass's name, told apart from others of the same name."""
        same = [other for other in self.passes if other.name == pass_.name]
        return pass_.name if len(same) == 1 else f"{pass_.name} ({same.index(pass_) + 1} of {len(same)})"

    def _progress(self, step: str) -> Progress:
        def report(done: int, total: int, label: str) -> None:
            if self.options.on_progress is not None:
                self.options.on_progress(step, done, total, label)

        return report


def _num_nodes(artifact: Artifact) -> int:
    assert artifact.graph is not None
    return artifact.graph.graph.num_nodes()


def _probe(artifact: Artifact) -> Probe:
    return Probe.of_vocabulary(artifact.checkpoint.config.get_text_config().vocab_size).with_scattered_rows()
