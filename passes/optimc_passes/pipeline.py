"""From a checkpoint to a finished graph: weight passes, then the graph with the weights attached, then graph passes;
last of all heads, trained on what the finished model says.

    artifact ─ weight pass ─ … ─ export ─ attach ─ verify ─ graph pass ─ verify ─ … ─ heads ─► artifact with graph

Every arrow into a pass is a look into the cache first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from optimc.errors import ConfigError, Fault
from optimc.plan import GraphReport, PassReport
from optimc_passes.artifact import Artifact, derive_key
from optimc_passes.base import Pass, PassContext, PassOutcome
from optimc_passes.choices import KV_PREFIX
from optimc_passes.graph.attach import attach_weights
from optimc_passes.graph.dump import GraphDump
from optimc_passes.graph.exported import Exported
from optimc_passes.graph.figures import GraphFigures, with_figures
from optimc_passes.heads_stage import run_heads_stage
from optimc_passes.pipeline_options import PipelineOptions, pass_label
from optimc_passes.quantize.linears import linear_weights
from optimc_passes.verify import GraphVerifier
from optimc_passes.verify.probe import Probe
from optimc_passes.weight_stage import run_weight_stage
from optimc_passes.weights import WeightStore

__all__ = ["GraphSource", "PipelineOptions", "PipelineResult", "check_order", "run_pipeline", "run_weight_stage"]


@dataclass(frozen=True)
class GraphSource:
    """Where the graph without weights comes from."""

    key: str
    """Hash of everything the export depends on: the model's config, the frontend's version, its options."""
    export: Callable[[], Exported]


@dataclass(frozen=True)
class PipelineResult:
    """The last artifact, with its graph, one report per pass in order, and one on the graph's way."""

    artifact: Artifact
    reports: tuple[PassReport, ...]
    graph: GraphReport


def check_order(passes: Sequence[Pass[Any] | type[Pass[Any]]]) -> list[tuple[int, str]]:
    """Return position and message for every pass that comes too late: weights, then the graph, then heads, once."""
    misplaced = []
    first_graph_pass: str | None = None
    heads_pass: str | None = None
    for index, pass_ in enumerate(passes):
        what = {"weights": "changes weights", "graph": "rewrites the graph", "heads": "adds heads"}[pass_.stage]
        if heads_pass is not None and pass_.stage == "heads":
            misplaced.append((index, f"{pass_.name} adds heads, and {heads_pass} has added them already; keep one"))
        elif heads_pass is not None:
            misplaced.append((index, f"{pass_.name} {what} and must come before {heads_pass}"))
        elif pass_.stage == "weights" and first_graph_pass is not None:
            misplaced.append((index, f"{pass_.name} {what} and must come before {first_graph_pass}"))
        if pass_.stage == "graph":
            first_graph_pass = first_graph_pass or pass_.name
        if pass_.stage == "heads":
            heads_pass = heads_pass or pass_.name
    return misplaced


def run_pipeline(
    passes: Sequence[Pass[Any]], artifact: Artifact, source: GraphSource, options: PipelineOptions | None = None
) -> PipelineResult:
    """Run the passes in order.

    Seconds of the graph are those of the graph passes, not of the heads'.

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
    artifact, reports = run_heads_stage(passes, artifact, options, run.done)
    return PipelineResult(artifact, (*run.reports, *reports), report)


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

    def export(self, source: GraphSource) -> tuple[Exported, float]:
        """Return the graph without weights, exported now or before, and the seconds its export took."""
        cache = self.options.cache
        found = cache.load_export(source.key) if cache else None
        if found is None:
            self.options.progress_of("export")(0, 1, "")
            start = time.perf_counter()
            exported = source.export()
            found = exported, time.perf_counter() - start
            self.options.progress_of("export")(1, 1, "")
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

    def _verified(self, pass_: Pass[Any], artifact: Artifact) -> PassOutcome:
        """Run a graph pass; compare its graph with the one before it."""
        assert self._verifier is not None
        before = artifact.graph
        outcome = pass_(artifact, PassContext(self.done, self.options.progress_of(pass_label(pass_, self.passes))))
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


def _num_nodes(artifact: Artifact) -> int:
    assert artifact.graph is not None
    return artifact.graph.graph.num_nodes()


def _probe(artifact: Artifact) -> Probe:
    return Probe.of_vocabulary(artifact.checkpoint.config.get_text_config().vocab_size).with_scattered_rows()
