"""How one attention is said to TensorRT: as ONNX's Attention where there is a fused kernel, else in primitives.

The fused kernel keeps no scores in memory; primitives hold [B, H, Q, K] of them. It knows bool masks and shared K/V
heads, no soft cap, and head sizes up to 256 in steps of 8 (seen of TensorRT-RTX 1.7.1: 20 and 320 fail, 24 builds).
Its `is_causal` means another corner and its `nonpad_kv_seqlen` is dropped in silence: masks say all there is to say.

Letters: B sequences, Q longest query, K keys in sight, H query heads, Hkv key/value heads, D head dim.
"""

from __future__ import annotations

import onnx_ir as ir

from optimc_passes.dialect.decompose import write_attention
from optimc_passes.dialect.paged_attention import PagedAttention
from optimc_passes.dialect.replacement import Replacement

_HEAD_DIMS = range(16, 257, 8)


def has_fused_kernel(spec: PagedAttention) -> bool:
    """Whether TensorRT has one kernel for it."""
    return not spec.softcap and spec.head_dim in _HEAD_DIMS


def attend(
    body: Replacement, spec: PagedAttention, q: ir.Value, keys: ir.Value, values: ir.Value, visible: ir.Value
) -> ir.Value:
    """Return [B, Q, H*D] from q [B, Q, H*D], keys and values [B, K, Hkv*D], visible bool [B, Q, K].

    Every row of `visible` has a True. Softmax is float32 in both forms.
    """
    if not has_fused_kernel(spec):
        return write_attention(body, spec, q, keys, values, body.op("Unsqueeze", visible, body.ints(1, 2)))
    mask = body.op("Unsqueeze", visible, body.ints(1))
    heads = {"q_num_heads": spec.num_heads, "kv_num_heads": spec.num_kv_heads}
    return body.op("Attention", q, keys, values, mask, **heads, scale=spec.scale)
