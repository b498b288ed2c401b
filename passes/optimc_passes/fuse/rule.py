"""What a fusion is made of: a rule says what to look for, when not to touch it, and what to put in its place.

    class TwoTransposes(Rule):
        def pattern(self, op, x): return op.Transpose(op.Transpose(x, _outputs=["inner"]), _outputs=["outer"])
        def check(self, context, inner, outer, **_): return ACCEPTED if ... else declined("the axes differ", outer)
        def rewrite(self, op, x, **_): return x

    class DropTransposes(FusionPass[NoOptions]):
        name, version, config_type = "drop_transposes", 1, NoOptions
        rules = (TwoTransposes,)

Patterns, matching and building are onnxscript's (`RewriteRuleClassBase`). A pattern is rooted in one node: one with
two roots would be tried at every pair of nodes. Where chains of unknown length lead to what a rule joins, the pattern
is the node they end in, and `check` and `rewrite` walk back from there (see `merge_qkv`).

A value that means the same keeps its name across a rewrite, one whose meaning changes gets a new name. Bisection and
dumps compare by name. The root's name passes on by itself; give others through `_outputs=[...]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import onnx_ir as ir
from onnxscript.rewriter.pattern import MatchResult, RewriteRule, RewriteRuleClassBase

from optimc_passes.artifact import Artifact
from optimc_passes.base import ConfigT, Metrics, Pass, PassConfig, PassContext, PassResult
from optimc_passes.fuse.apply_rules import apply_rules
from optimc_passes.fuse.recorder import Recorder

ACCEPTED = MatchResult()
"""What `Rule.check` returns for a site that shall be rewritten."""


def declined(reason: str, *where: ir.Value | ir.Node | None) -> MatchResult:
    """Return what `Rule.check` returns for a site that stays: why, and the values or nodes at which it was decided."""
    result: MatchResult = MatchResult().fail(reason, [place for place in where if place is not None])
    return result


class Rule(RewriteRuleClassBase):
    """One pattern, its check and its rewrite. Subclasses fill in the three; `check` may be left out.

    `pattern(op, x, ...)` returns the root's output; its parameters are bound by name and given to `check(context, ...)`
    and `rewrite(op, ...)`. `check` may decide but not change; what it learns `rewrite` finds out again.
    """

    already: ClassVar[frozenset[str]] = frozenset()
    """Reasons of `check` that mean "nothing to do" rather than "something is in the way"."""
    unrelated: ClassVar[frozenset[str]] = frozenset()
    """Reasons of `check` that mean "this is no place for the rule", where its pattern is one everyday node."""
    commute: ClassVar[bool] = False
    """Whether the operands of Add and Mul in the pattern may come in either order."""
    keeps_inner: ClassVar[bool] = False
    """Whether values inside the pattern may have readers outside; otherwise such a site does not match."""

    def __init__(self) -> None:
        super().__init__(type(self).__name__, remove_nodes=not self.keeps_inner)

    @classmethod
    def compiled(cls) -> Sequence[RewriteRule]:
        """Return onnxscript's form of the rule, one for each order of operands."""
        rule = cls.rule()
        return rule.commute() if cls.commute else (rule,)


def recorder_of(rules: Sequence[type[Rule]]) -> Recorder:
    """Return a recorder that knows which reasons of these rules have a meaning of their own."""
    return Recorder(
        already=(reason for rule in rules for reason in rule.already),
        unrelated=(reason for rule in rules for reason in rule.unrelated),
    )


class NoOptions(PassConfig):
    """No options."""


class FusionPass(Pass[ConfigT]):
    """A graph pass that applies rules everywhere, in order, each once over the graph.

    Subclasses name their rules and are otherwise complete. Rules see the work of those before them.
    """

    stage: ClassVar[Literal["graph"]] = "graph"
    rules: ClassVar[tuple[type[Rule], ...]]

    def run(self, artifact: Artifact, context: PassContext) -> PassResult:
        """Rewrite what matches and passes its check; report counts, reasons and the nearest miss."""
        assert artifact.graph is not None
        recorder = recorder_of(self.rules)
        apply_rules(
            artifact.graph,
            [rule.compiled() for rule in self.rules],
            recorder,
            lambda done, total: context.progress(done, total, self.name),
        )
        report = recorder.report()
        metrics: Metrics = {"matched": report.matched, "declined": sum(entry.sites for entry in report.declined)}
        return PassResult(artifact, metrics, recorder.decisions(), report)


def typed(value: Any, shape: ir.Shape | Sequence[Any] | None, dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
    """Declare what a rewrite emits, for the rules that come after; returns the value."""
    assert isinstance(value, ir.Value)
    value.shape = shape if shape is None or isinstance(shape, ir.Shape) else ir.Shape(shape)
    value.type = ir.TensorType(dtype)
    return value
