"""What the matcher saw: how often a rule fired, where it declined and why, and what came closest to firing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import onnx_ir as ir
from onnxscript.rewriter.pattern import MatchingTracer, MatchResult, MatchStatus, RewriteRule

from optimc.plan import DeclinedSites, FusionReport, NearestMiss
from optimc_passes.fuse.surroundings import surroundings

READ_OUTSIDE = "a value inside the pattern has a reader outside"

_NOT_REMOVABLE = "Matched nodes have other uses preventing replacement."
"""How onnxscript's matcher puts it."""


@dataclass(frozen=True)
class _Miss:
    """A site that was left alone. Names are taken down at once: the graph changes afterwards."""

    reason: str
    where: str


class Recorder(MatchingTracer):
    """Listens to onnxscript's matcher while rules are tried at every node.

    A site is the node a pattern is rooted in. Where one variant of a rule declines and another fires, it fired.
    """

    def __init__(self, already: Iterable[str] = (), unrelated: Iterable[str] = ()) -> None:
        """`already` and `unrelated` are reasons with a meaning of their own, see `Rule`."""
        super().__init__()
        self._already = frozenset(already)
        self._unrelated = frozenset(unrelated)
        self._matched: set[ir.Node] = set()
        self._misses: dict[ir.Node, _Miss] = {}
        self._nearest: tuple[int, ir.Node, NearestMiss] | None = None

    def log(
        self,
        rule: RewriteRule,
        container: ir.Graph | ir.Function,  # noqa: ARG002 - the matcher passes it
        node: ir.Node,
        match_result: MatchResult,
        status: MatchStatus,
    ) -> None:
        """Take down one attempt of `rule` at `node`."""
        if status == MatchStatus.SUCCESS:
            self._matched.add(node)
            return
        reason = match_result.reason or f"{rule.name} gives no reason"
        if reason == _NOT_REMOVABLE:
            # The whole pattern is there: that is worth as much as a check that says no.
            reason, status = READ_OUTSIDE, MatchStatus.CONDITION_FAILED
        blamed = _blamed(match_result) or node
        if reason in self._unrelated:
            status = MatchStatus.NO_MATCH
        if status != MatchStatus.NO_MATCH:
            self._misses.setdefault(node, _Miss(reason, _called(blamed)))
        # A pattern that fits whole and is declined is nearer than one that fits in part.
        score = len(match_result.nodes) + 100 * int(status)
        if len(match_result.nodes) and reason not in self._already and (not self._nearest or score > self._nearest[0]):
            near = NearestMiss(
                node=_called(blamed),
                op=blamed.op_type,
                reason=reason,
                matched_nodes=len(match_result.nodes),
                surroundings=surroundings(blamed),
            )
            self._nearest = score, node, near

    def report(self) -> FusionReport:
        """Return the counts, the reasons and the nearest miss."""
        already, declined = self._by_reason()
        return FusionReport(
            matched=len(self._matched),
            already=sum(len(sites) for sites in already.values()),
            declined=tuple(
                DeclinedSites(reason=reason, sites=len(sites), first=sites[0]) for reason, sites in declined.items()
            ),
            nearest=self._nearest[2] if self._nearest and self._nearest[1] not in self._matched else None,
        )

    def decisions(self) -> tuple[str, ...]:
        """Return one sentence per reason, with how often and where first."""
        already, declined = self._by_reason()
        sentences = [
            f"{verdict} at {len(sites)} {'site' if len(sites) == 1 else 'sites'}, first at {sites[0]}: {reason}"
            for verdict, by_reason in (("nothing to do", already), ("declined", declined))
            for reason, sites in by_reason.items()
        ]
        if not sentences and not self._matched:
            sentences.append("nothing to do: the pattern does not occur")
        return tuple(sentences)

    def _by_reason(self) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
        """Return where there was nothing to do and where something was in the way."""
        already: dict[str, list[str]] = {}
        declined: dict[str, list[str]] = {}
        for node, miss in self._misses.items():
            if node not in self._matched:
                kind = already if miss.reason in self._already else declined
                kind.setdefault(miss.reason, []).append(miss.where)
        return already, declined


def _called(node: ir.Node) -> str:
    """Return a name for the node: its own, or its first output's."""
    return node.name or (node.outputs[0].name if node.outputs else None) or node.op_type


def _blamed(match_result: MatchResult) -> ir.Node | None:
    """Return the node that the reason is about."""
    for source in match_result.failure_nodes_and_values:
        node = source if isinstance(source, ir.Node) else source.producer() or next(iter(source.consumers()), None)
        if node is not None:
            return node
    return None
