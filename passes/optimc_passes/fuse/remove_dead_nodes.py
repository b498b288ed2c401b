"""Nodes that nothing reads and that give no output of the graph, and weights that only they read."""

from __future__ import annotations

from typing import ClassVar, Literal

from onnx_ir.passes.common import RemoveUnusedNodesPass

from optimc.plan import FusionReport
from optimc_passes.artifact import Artifact
from optimc_passes.base import Metrics, Pass, PassContext, PassResult
from optimc_passes.fuse.rule import NoOptions


class RemoveDeadNodes(Pass[NoOptions]):
    """Nodes whose results nobody reads go. Rules remove what they replace themselves; this is for what was dead before.

    No rule: what is gone has no root to put something in its place.
    """

    name = "remove_dead_nodes"
    version = 1
    stage: ClassVar[Literal["graph"]] = "graph"
    config_type = NoOptions

    def run(self, artifact: Artifact, context: PassContext) -> PassResult:  # noqa: ARG002 - it is too fast to report
        """Remove them and report how many."""
        assert artifact.graph is not None
        before = len(artifact.graph.graph)
        model = RemoveUnusedNodesPass()(artifact.graph).model
        removed = before - len(model.graph)
        metrics: Metrics = {"matched": removed, "declined": 0}
        decisions = () if removed else ("nothing to do: every node is read",)
        return PassResult(artifact.evolve(graph=model), metrics, decisions, FusionReport(matched=removed))
