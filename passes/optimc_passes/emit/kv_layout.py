"""The KV cache of a graph: its geometry from the graph, its number formats from the recipe and from passes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from optimc.errors import LoweringError
from optimc.plan import KvDtype, KvLayer, KvLayout, PlanTensor
from optimc_passes import kv_weights
from optimc_passes.choices import KvChoice
from optimc_passes.dialect.paged_attention import PagedAttention, is_paged_attention
from optimc_passes.weights import Dense, Weight


def kv_layout(model: ir.Model, block_size: int, dtype: KvDtype, choices: Sequence[KvChoice] = ()) -> KvLayout:
    """Return the layout of the graph's attention layers, in blocks of `block_size` slots.

    All layers hold `dtype`, or what `choices` says of each. Raises LoweringError for choices of another number of
    layers.
    """
    specs = sorted(
        (PagedAttention.from_node(node) for node in model.graph if is_paged_attention(node)), key=lambda s: s.layer
    )
    if not choices:
        layers = [KvLayer(num_kv_heads=s.num_kv_heads, head_dim=s.head_dim, window=s.window) for s in specs]
        return KvLayout(block_size=block_size, dtype=dtype, layers=tuple(layers))
    if len(choices) != len(specs):
        raise LoweringError(
            f"a KV format was chosen for {len(choices)} layers, the graph has {len(specs)} with attention"
        )
    usual = Counter(choice.dtype for choice in choices).most_common(1)[0][0]
    layers = [_layer(spec, choice, usual) for spec, choice in zip(specs, choices, strict=True)]
    return KvLayout(block_size=block_size, dtype=usual, layers=tuple(layers))


def key_scale_tensors(layout: KvLayout, weights: Mapping[str, Weight]) -> list[PlanTensor]:
    """Return the plan tensors the layout names, from the weights a pass left for them."""
    tensors = []
    for index, layer in enumerate(layout.layers):
        if layer.key_scales is not None:
            tensors.append(_tensor(layer.key_scales, weights[kv_weights.key_scales(index)]))
        if layer.key_minimums is not None:
            tensors.append(_tensor(layer.key_minimums, weights[kv_weights.key_minimums(index)]))
    return tensors


def _layer(spec: PagedAttention, choice: KvChoice, usual: KvDtype) -> KvLayer:
    channel = choice.keys == "channel"
    return KvLayer(
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        window=spec.window,
        dtype=None if choice.dtype == usual else choice.dtype,
        keys=choice.keys,
        provenance=choice.provenance,
        calibration_tokens=choice.tokens,
        key_scales=f"kv/{spec.layer}/key_scales" if channel else None,
        key_minimums=f"kv/{spec.layer}/key_minimums" if channel and choice.dtype == "int4" else None,
    )


def _tensor(name: str, weight: Weight) -> PlanTensor:
    assert isinstance(weight, Dense), f"{name} is quantized"
    return PlanTensor(name, "F32", weight.shape, lambda: weight.read().astype(np.float32, copy=False))
