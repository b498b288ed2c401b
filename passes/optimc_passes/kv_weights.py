"""Names under which a weight store holds what belongs to the KV cache; none of it reaches the graph."""

from __future__ import annotations

from optimc_passes.choices import KV_PREFIX


def key_scales(layer: int) -> str:
    """Return the name of a layer's key scales, Dense float32 [Hkv, D], positive."""
    return f"{KV_PREFIX}{layer}.key_scales"


def key_minimums(layer: int) -> str:
    """Return the name of a layer's key minimums, Dense float32 [Hkv, D]; int4 alone has them."""
    return f"{KV_PREFIX}{layer}.key_minimums"
