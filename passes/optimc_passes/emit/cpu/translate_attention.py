"""Attention, and the rotation of the queries and keys it reads.

Letters: T tokens, H query heads, Hkv key/value heads, D head dim, F frequencies.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from optimc.plan.cpu_program import Attention, View
from optimc_passes.dialect.paged_attention import PagedAttention
from optimc_passes.emit.cpu.axes import Axes
from optimc_passes.emit.cpu.emitter import Emitter, label
from optimc_passes.emit.cpu.no_kernel import NoKernelError
from optimc_passes.emit.cpu.rotations import rotate, same_angles
from optimc_passes.emit.cpu.values import Rotated, Rows, Value, view_of

Given = Sequence[Value | None]


def rotary_embedding(e: Emitter, node: ir.Node, given: Given) -> Rows:
    """RotaryEmbedding of packed heads [T, H * D]: nothing is computed, attention will rotate them."""
    x, cos, sin = given[:3]
    if not isinstance(x, Rows):
        raise NoKernelError("an operand is no activation")
    rotation = e.rotation(label(node), same_angles(cos, sin))
    if len(node.inputs) > 3:
        raise NoKernelError("the tables are looked up by position_ids")
    return rotate(
        x,
        rotation,
        heads=node.attributes.get_int("num_heads", 0),
        turned=node.attributes.get_int("rotary_embedding_dim", 0),
        interleaved=bool(node.attributes.get_int("interleaved", 0)),
    )


def attention(e: Emitter, node: ir.Node, given: Given) -> Rows:
    """PagedAttention of q [T, H * D], k and v [T, Hkv * D]."""
    spec = PagedAttention.from_node(node)
    q, k, v = given
    (q_view, q_turn), (k_view, k_turn) = _heads(q), _heads(k)
    if _settings(q_turn) != _settings(k_turn):
        raise NoKernelError("queries and keys are rotated differently")
    if q_turn is not None and (q_turn.head_dim, k_turn and k_turn.head_dim) != (spec.head_dim, spec.head_dim):
        raise NoKernelError(f"heads are rotated as if they had {q_turn.head_dim} dimensions, not {spec.head_dim}")
    name = label(node)
    out = e.new(name, "tokens", spec.q_width)
    e.emit(
        Attention(
            name=name,
            layer=spec.layer,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            scale=spec.scale,
            window=spec.window,
            softcap=spec.softcap,
            rotation=None if q_turn is None else q_turn.rotation,
            interleaved=q_turn is not None and q_turn.interleaved,
            q=q_view,
            k=k_view,
            v=view_of(v),
            out=out,
        )
    )
    return Rows(out, Axes(0, (spec.q_width,)))


def _heads(value: Value | None) -> tuple[View, Rotated | None]:
    """Return where heads lie, and how they are to be rotated."""
    if isinstance(value, Rows) and isinstance(value.content, Rotated):
        return value.content.view, value.content
    return view_of(value), None


def _settings(turn: Rotated | None) -> tuple[View, bool] | None:
    return None if turn is None else (turn.rotation, turn.interleaved)
