"""Merge the query, key and value projections of a layer: one product reads the activations once."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript.rewriter.pattern import MatchResult

from optimc_passes.dialect.paged_attention import DOMAIN, OP_TYPE
from optimc_passes.fuse.feeding import Feeding
from optimc_passes.fuse.merge_projections import check_merge, merge
from optimc_passes.fuse.rebuild import emit_again, rebuild
from optimc_passes.fuse.rule import FusionPass, NoOptions, Rule, declined

ONE_LAYER = "one linear layer gives query, key and value already"


class JoinProjections(Rule):
    """Three linear layers of one input that reach one PagedAttention become one and a Split.

    Between projection and attention anything may happen (bias, reshape, norm, RoPE): the pattern is the attention, and
    `check` walks back from its operands.
    """

    already = frozenset({ONE_LAYER})

    def pattern(self, op: Any, q: Any, k: Any, v: Any) -> Any:
        """Match an attention."""
        return op.PagedAttention(q, k, v, _domain=DOMAIN, _outputs=["attended"])

    def check(self, _context: Any, q: ir.Value, k: ir.Value, v: ir.Value, attended: ir.Value) -> MatchResult:
        """Decline where the three cannot share one weight."""
        root = attended.producer()
        assert root is not None
        feedings = [Feeding.trace(value, _before_attention) for value in (q, k, v)]
        for role, feeding in zip(("query", "key", "value"), feedings, strict=True):
            if len(feeding.projections) != 1:
                return declined(f"the {role} comes from {len(feeding.projections)} linear layers, not one", root)
        num_layers = len({feeding.projections[0].node for feeding in feedings})
        if num_layers == 1:
            return declined(ONE_LAYER, root)
        if num_layers == 2:
            return declined("two of query, key and value come from one linear layer, the third does not", root)
        return check_merge(feedings, root)

    def rewrite(self, op: Any, q: ir.Value, k: ir.Value, v: ir.Value, attended: ir.Value) -> Any:
        """Emit the joined layer, what stood between the three and the attention, and the attention."""
        root = attended.producer()
        assert root is not None
        feedings = [Feeding.trace(value, _before_attention) for value in (q, k, v)]
        replaced = merge(op, [feeding.projections[0] for feeding in feedings])
        operands: list[ir.Value | None] = [
            rebuild(op, value, replaced, feeding.between) for value, feeding in zip((q, k, v), feedings, strict=True)
        ]
        return emit_again(op, root, operands)[0]


class MergeQkv(FusionPass[NoOptions]):
    """MatMul(x, Wq), MatMul(x, Wk), MatMul(x, Wv) that reach one PagedAttention become one MatMul and a Split.

    Widths may differ, as with grouped-query attention. Declined where the three cannot share one weight: other inputs,
    bit widths, groups or permutations, or a weight or product somebody else reads.
    """

    name = "merge_qkv"
    version = 2
    config_type = NoOptions
    rules = (JoinProjections,)


def _before_attention(node: ir.Node) -> bool:
    """Whether a node may lie between a projection and its attention: anything but another product or attention."""
    return node.op_type not in {"MatMul", "Gemm", OP_TYPE}
