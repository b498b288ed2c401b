"""The KV cache a graph asks for."""

from __future__ import annotations

import onnx_ir as ir

from optimc.plan import KvLayer, KvLayout
from optimc.plan.kv_layout import KvDtype
from optimc_passes.dialect.paged_attention import PagedAttention, is_paged_attention


def kv_layout(model: ir.Model, block_size: int, dtype: KvDtype) -> KvLayout:
    """Return the layout of the graph's attention layers, in blocks of `block_size` slots."""
    specs = sorted(
        (PagedAttention.from_node(node) for node in model.graph if is_paged_attention(node)), key=lambda s: s.layer
    )
    layers = tuple(KvLayer(num_kv_heads=s.num_kv_heads, head_dim=s.head_dim, window=s.window) for s in specs)
    return KvLayout(block_size=block_size, dtype=dtype, layers=layers)
