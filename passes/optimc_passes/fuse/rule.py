"""What a fusion is made of: find sites, check each and say why not, rewrite those that pass.

Our rules join siblings (three products of one input) found through chains of unknown length (bias, norm, RoPE), which
a pattern of fixed shape rooted in one node does not express; so a rule walks the graph itself.

    class MergeThings(FusionPass[MergeThingsConfig]):
        name, version, config_type = "merge_things", 1, MergeThingsConfig
        def find(self, graph): ...      # sites where the pattern begins
        def check(self, site): ...      # a match, or a Miss with its reason
        def rewrite(self, graph, match): ...
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Generic, Literal, TypeVar

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from optimc_passes.artifact import Artifact
from optimc_passes.base import ConfigT, Pass, PassContext, PassResult

SiteT = TypeVar("SiteT")
MatchT = TypeVar("MatchT")


@dataclass(frozen=True)
class Miss:
    """Why a rule leaves a site alone."""

    reason: str
    node: ir.Node
    """The node at which it was decided."""
    done_already: bool = False
    """There is nothing to do, rather than something in the way."""


class FusionPass(Pass[ConfigT], Generic[ConfigT, SiteT, MatchT]):
    """A graph pass that applies one rule everywhere. Sites must not overlap."""

    stage: ClassVar[Literal["graph"]] = "graph"

    @abstractmethod
    def find(self, graph: ir.Graph) -> Iterable[SiteT]:
        """Yield the places where the pattern may apply, in graph order. The graph does not change meanwhile."""

    @abstractmethod
    def check(self, site: SiteT) -> MatchT | Miss:
        """Return what `rewrite` needs, or why the site stays as it is."""

    @abstractmethod
    def rewrite(self, graph: ir.Graph, match: MatchT) -> None:
        """Replace the matched nodes. What nobody uses afterwards is removed by the base class."""

    def run(self, artifact: Artifact, context: PassContext) -> PassResult:
        """Check every site, rewrite the matches, report both counts and each reason once."""
        assert artifact.graph is not None
        graph = artifact.graph.graph
        checked = [self.check(site) for site in self.find(graph)]
        matches = [result for result in checked if not isinstance(result, Miss)]
        misses = [result for result in checked if isinstance(result, Miss)]
        for done, match in enumerate(matches):
            context.progress(done, len(matches), self.name)
            self.rewrite(graph, match)
        context.progress(len(matches), len(matches), self.name)
        model = RemoveUnusedNodesPass()(artifact.graph).model
        declined = [miss for miss in misses if not miss.done_already]
        metrics: dict[str, float | int | str] = {"matched": len(matches), "declined": len(declined)}
        return PassResult(artifact.evolve(graph=model), metrics, _explain(len(matches), misses))


def _explain(num_matches: int, misses: list[Miss]) -> tuple[str, ...]:
    """Return one sentence per reason, with how often and where first."""
    by_reason: dict[str, list[Miss]] = {}
    for miss in misses:
        by_reason.setdefault(miss.reason, []).append(miss)
    sentences = [
        f"{'nothing to merge' if same[0].done_already else 'declined'} at {len(same)} "
        f"{'site' if len(same) == 1 else 'sites'}, first at {same[0].node.name or same[0].node.op_type}: {reason}"
        for reason, same in by_reason.items()
    ]
    if not num_matches and not misses:
        sentences.append("nothing to merge: the pattern does not occur")
    return tuple(sentences)
