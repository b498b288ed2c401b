"""What stands between the product of query, key and value and the attention as one RotaryQkv."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript.rewriter.pattern import MatchResult

from optimc_passes.dialect import DOMAIN, DOMAIN_VERSION, ROTARY_QKV, PagedAttention
from optimc_passes.fuse.heads import Heads, UnreadableError, query_key_value
from optimc_passes.fuse.rebuild import emit_again
from optimc_passes.fuse.rule import ACCEPTED, FusionPass, NoOptions, Rule, declined

NOT_ROTATED = "query and key are not rotated"
FUSED = "RotaryQkv gives query, key and value already"


class RotationBeforeAttention(Rule):
    """PagedAttention over columns of one product, query and key rotated by the same angles.

    The pattern is the attention, and `check` reads back from its operands. Norms must be part of a RotaryQkv already.
    """

    already = frozenset({NOT_ROTATED, FUSED})

    def pattern(self, op: Any, q: Any, k: Any, v: Any) -> Any:
        """Match an attention."""
        return op.PagedAttention(q, k, v, _domain=DOMAIN, _outputs=["attended"])

    def check(self, _context: Any, q: ir.Value, attended: ir.Value, **_: Any) -> MatchResult:
        """Decline where the three are not columns of one product, or not treated alike."""
        root = attended.producer()
        assert root is not None
        if is_fused(q):
            return declined(FUSED, root)
        try:
            query, key, _value = query_key_value(root)
        except UnreadableError as error:
            return declined(str(error), error.node or root)
        if query.rotation is None:
            return declined(NOT_ROTATED, root)
        for heads in (query, key):
            if heads.norm is not None and heads.norm.node is not heads.node:
                return declined("query and key are normed first; qk_norm takes that in", heads.norm.node)
        return ACCEPTED

    def rewrite(self, op: Any, q: ir.Value, k: ir.Value, v: ir.Value, attended: ir.Value) -> Any:
        """Emit the operator and the attention."""
        root = attended.producer()
        assert root is not None
        outputs = emit_rotary_qkv(op, root, query_key_value(root), names=(q, k, v), rotate=True)
        return emit_again(op, root, outputs)[0]


class RotaryQkv(FusionPass[NoOptions]):
    """Split, RotaryEmbedding of query and of key, and what moves axes around them become one operator."""

    name = "rotary_qkv"
    version = 1
    config_type = NoOptions
    rules = (RotationBeforeAttention,)


def is_fused(q: ir.Value) -> bool:
    """Whether the query comes from a RotaryQkv directly."""
    node = q.producer()
    return node is not None and node.domain == DOMAIN and node.op_type == ROTARY_QKV


def emit_rotary_qkv(
    op: Any, attention: ir.Node, heads: tuple[Heads, Heads, Heads], names: tuple[ir.Value, ...], *, rotate: bool
) -> list[ir.Value]:
    """Emit the operator in front of `attention`; its outputs have the names of what means the same in the graph.

    Without `rotate` it only splits and norms.
    """
    spec = PagedAttention.from_node(attention)
    q, k, _ = heads
    rotation = q.rotation if rotate else None
    outputs = [ir.Value(name=value.name, shape=value.shape, type=value.type) for value in names]
    operands = [q.source, rotation and rotation.cos, rotation and rotation.sin]
    if q.norm is not None and k.norm is not None:
        operands += [q.norm.scale, k.norm.scale]
    elif rotation is None:
        operands = operands[:1]
    op.op(
        ROTARY_QKV,
        *operands,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        rotary_dim=rotation.rotary_dim if rotation else 0,
        interleaved=int(rotation.interleaved) if rotation else 0,
        epsilon=q.norm.epsilon if q.norm else 0.0,
        _domain=DOMAIN,
        _version=DOMAIN_VERSION,
        _outputs=outputs,
        _name=f"{(attention.name or '').rpartition('/')[0]}/{ROTARY_QKV}",
    )
    return outputs
