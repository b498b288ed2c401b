"""The optimc dialect: its operators, what each means, their form in standard ONNX, and its rules."""

from optimc_passes.dialect.add_rms_norm import ADD_RMS_NORM, AddRmsNorm, add_rms_norm
from optimc_passes.dialect.decompose import LayerPorts, PagedPorts, WindowInputs, decompose_causal, decompose_paged
from optimc_passes.dialect.decompose_fused import decompose_fused
from optimc_passes.dialect.gated_activation import (
    ACTIVATIONS,
    GATED_ACTIVATION,
    Activation,
    GatedActivation,
    gated_activation,
)
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
from optimc_passes.dialect.rotary_qkv import ROTARY_QKV, RotaryQkv, rotary_qkv
from optimc_passes.dialect.rules import verify_graph

__all__ = [
    "ACTIVATIONS",
    "ADD_RMS_NORM",
    "DOMAIN",
    "DOMAIN_VERSION",
    "GATED_ACTIVATION",
    "OP_TYPE",
    "ROTARY_QKV",
    "Activation",
    "AddRmsNorm",
    "GatedActivation",
    "LayerPorts",
    "PagedAttention",
    "PagedPorts",
    "RotaryQkv",
    "WindowInputs",
    "add_rms_norm",
    "attend",
    "causal_attention",
    "decompose_causal",
    "decompose_fused",
    "decompose_paged",
    "gated_activation",
    "is_paged_attention",
    "paged_attention",
    "rotary_qkv",
    "verify_graph",
    "window_mask",
]
