"""What a network's attention kernels are compiled for: one variant for all layers that are alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from optimc.errors import LoweringError
from optimc.plan import KvDtype, KvLayout
from optimc.plan.tensorrt_program import HalfType
from optimc_passes.dialect.paged_attention import PagedAttention

PoolType = Literal["float16", "bfloat16", "int8", "fp8"]

TRITON_TYPES: dict[PoolType, str] = {"float16": "fp16", "bfloat16": "bf16", "int8": "i8", "fp8": "fp8e4nv"}
"""Triton's names of element types."""

MAX_GROUP = 64
"""Most query heads per key/value head: they share a tile."""


@dataclass(frozen=True)
class AttentionVariant:
    """Everything constant in a layer's attention, but for its place in the network."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    half: HalfType
    """Of queries and the answer."""
    pool: PoolType
    scale: float
    softcap: float
    window: int
    has_tree: bool
    """Whether steps bring a tree mask."""

    @property
    def group(self) -> int:
        """Query heads that share a key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def is_scaled(self) -> bool:
        """Whether the pool has scales beside its codes."""
        return self.pool in ("int8", "fp8")

    @property
    def padded_head_dim(self) -> int:
        """`head_dim` rounded up to the power of two a tile needs."""
        return max(16, 1 << (self.head_dim - 1).bit_length())


def attention_variants(
    layout: KvLayout, specs: Sequence[PagedAttention], half: HalfType, *, has_tree: bool
) -> tuple[AttentionVariant, ...]:
    """Return the variant of each layer; `specs` are the layers' attention nodes in the layout's order.

    Raises LoweringError naming the first layer whose cache the kernel cannot read.
    """
    assert len(specs) == len(layout.layers), f"{len(specs)} attention nodes, {len(layout.layers)} caches"
    return tuple(_variant(layout, index, spec, half, has_tree) for index, spec in enumerate(specs))


def _variant(layout: KvLayout, index: int, spec: PagedAttention, half: HalfType, has_tree: bool) -> AttentionVariant:
    layer = layout.layers[index]
    if layer.keys == "channel":
        raise LoweringError(f"layer {index}: the attention kernel reads scales per token, not per channel")
    if spec.num_heads > MAX_GROUP * spec.num_kv_heads:
        raise LoweringError(
            f"layer {index}: {spec.num_heads} query heads on {spec.num_kv_heads} key/value heads, the attention kernel "
            f"takes at most {MAX_GROUP} on one"
        )
    return AttentionVariant(
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        layout.block_size,
        half,
        _pool_type(layout.dtype_of(index), half, index),
        spec.scale,
        spec.softcap,
        spec.window,
        has_tree,
    )


def _pool_type(dtype: KvDtype, half: HalfType, index: int) -> PoolType:
    if dtype == "float32":
        return half
    if dtype == "int4":
        raise LoweringError(f"layer {index}: the attention kernel reads no int4 cache; use int8")
    return dtype
