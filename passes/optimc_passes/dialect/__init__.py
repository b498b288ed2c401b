"""The optimc dialect: its attention operator, what it means, its form in standard ONNX, and its rules."""

from optimc_passes.dialect.decompose import LayerPorts, PagedPorts, WindowInputs, decompose_causal, decompose_paged
from optimc_passes.dialect.paged_attention import (
    DOMAIN,
    DOMAIN_VERSION,
    OP_TYPE,
    PagedAttention,
    attend,
    causal_attention,
    is_paged_attention,
    paged_attention,
    window_mask,
)
from optimc_passes.dialect.rules import verify_graph

__all__ = [
    "DOMAIN",
    "DOMAIN_VERSION",
    "OP_TYPE",
    "LayerPorts",
    "PagedAttention",
    "PagedPorts",
    "WindowInputs",
    "attend",
    "causal_attention",
    "decompose_causal",
    "decompose_paged",
    "is_paged_attention",
    "paged_attention",
    "verify_graph",
    "window_mask",
]
