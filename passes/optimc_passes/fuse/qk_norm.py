"""Norms of query and key become part of the operator that splits their product."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript.rewriter.pattern import MatchResult

from optimc_passes.dialect import DOMAIN
from optimc_passes.fuse.heads import Heads, UnreadableError, query_key_value
from optimc_passes.fuse.rebuild import emit_again, rebuild
from optimc_passes.fuse.rotary_qkv import emit_rotary_qkv, is_fused
from optimc_passes.fuse.rule import ACCEPTED, FusionPass, NoOptions, Rule, declined

NO_NORM = "query and key are not normed"
FUSED = "RotaryQkv norms query and key already"


class NormsBeforeAttention(Rule):
    """PagedAttention over normed columns of one product.

    The norm may be of each head or of the whole row, and a rotation may follow it. The pattern is the attention, and
    `check` reads back from its operands.
    """

    already = frozenset({FUSED})
    unrelated = frozenset({NO_NORM})

    def pattern(self, op: Any, q: Any, k: Any, v: Any) -> Any:
        """Match an attention."""
        return op.PagedAttention(q, k, v, _domain=DOMAIN, _outputs=["attended"])

    def check(self, _context: Any, q: ir.Value, attended: ir.Value, **_: Any) -> MatchResult:
        """Decline where the three are not columns of one product, or query and key not normed alike."""
        root = attended.producer()
        assert root is not None
        if is_fused(q):
            return declined(FUSED, root)
        try:
            query, _key, _value = query_key_value(root)
        except UnreadableError as error:
            return declined(str(error), error.node or root)
        if query.norm is None:
            return declined(NO_NORM, root)
        if query.norm.node is query.node:
            return declined(FUSED, root)
        return ACCEPTED

    def rewrite(self, op: Any, q: ir.Value, k: ir.Value, v: ir.Value, attended: ir.Value) -> Any:
        """Emit the operator, the rotations if there are any, and the attention."""
        root = attended.producer()
        assert root is not None
        heads = query_key_value(root)
        ends = [_normed(value, part) for value, part in zip((q, k), heads, strict=False)]
        outputs = emit_rotary_qkv(op, root, heads, names=(*ends, v), rotate=False)
        replaced = dict(zip(ends, outputs, strict=False))
        operands = [
            rebuild(op, value, replaced, _rotating(value)) if part.rotation else replaced[value]
            for value, part in zip((q, k), heads, strict=False)
        ]
        return emit_again(op, root, [*operands, outputs[2]])[0]


class QkNorm(FusionPass[NoOptions]):
    """RMSNormalization of query and of key, per head or per row, becomes part of RotaryQkv, before any rotation."""

    name = "qk_norm"
    version = 1
    config_type = NoOptions
    rules = (NormsBeforeAttention,)


def _rotating(value: ir.Value) -> frozenset[ir.Node]:
    """Return the Squeeze, RotaryEmbedding and Unsqueeze that end in `value`."""
    nodes = []
    current: ir.Value | None = value
    for _ in range(3):
        node = None if current is None else current.producer()
        assert node is not None, "query_key_value read them"
        nodes.append(node)
        current = node.inputs[0]
    return frozenset(nodes)


def _normed(value: ir.Value, heads: Heads) -> ir.Value:
    """Return what the rotation reads: normed query or key, packed into rows."""
    if heads.rotation is None:
        return value
    unsqueeze = heads.rotation.node.inputs[0]
    producer = None if unsqueeze is None else unsqueeze.producer()
    assert producer is not None, "query_key_value read it"
    packed = producer.inputs[0]
    assert packed is not None
    return packed
