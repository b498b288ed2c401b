"""The attention kernels of a network, compiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from optimc.errors import LoweringError
from optimc.plan import KvLayout
from optimc.plan.tensorrt_program import HalfType
from optimc_passes.dialect.paged_attention import PagedAttention
from optimc_passes.emit.tensorrt_kernels.attention_tiles import (
    MAX_SPLITS,
    AttentionTile,
    Purpose,
    attention_tile,
    shared_bytes,
    smaller_tile,
)
from optimc_passes.emit.tensorrt_kernels.attention_variant import TRITON_TYPES, AttentionVariant, attention_variants
from optimc_passes.emit.tensorrt_kernels.compile_source import (
    CompiledKernel,
    Specialization,
    capability_of,
    compile_source,
    import_triton,
)

FP8_CAPABILITY = 89
"""First to convert float8 e4m3 in hardware; Triton compiles it for no older one."""


@dataclass(frozen=True)
class TiledKernel:
    """A compiled `paged_attention` and the tile it was compiled with, on which its grid depends."""

    kernel: CompiledKernel
    tile: AttentionTile


@dataclass(frozen=True)
class AttentionKernels:
    """What the layers of one variant need on one architecture. Grids are in `plugin_design`."""

    variant: AttentionVariant
    layers: tuple[int, ...]
    decode: TiledKernel
    """Leaves parts."""
    merge: CompiledKernel
    """Joins them."""
    prefill: TiledKernel
    """Does not split."""


def compile_paged_attention(
    layout: KvLayout,
    specs: Sequence[PagedAttention],
    half: HalfType,
    architectures: Sequence[str],
    *,
    has_tree: bool = False,
) -> list[AttentionKernels]:
    """Return the kernels of each distinct variant of attention for each architecture.

    `specs` are the layers' attention nodes, in the layout's order; `has_tree` says that steps may bring tree masks.
    Raises as `compile_source`, and LoweringError for a cache the kernel cannot read, or not on an architecture.
    """
    layers: dict[AttentionVariant, list[int]] = {}
    for index, variant in enumerate(attention_variants(layout, specs, half, has_tree=has_tree)):
        layers.setdefault(variant, []).append(index)
    for architecture in architectures:
        for variant, indices in layers.items():
            refuse(variant, architecture, f"layer {indices[0]}")
    kernels = []
    for variant, indices in layers.items():
        for architecture in architectures:
            decode, prefill = (
                compile_attention(f"{purpose}/{indices[0]}", variant, purpose, architecture, split=split)
                for purpose, split in _PURPOSES
            )
            merge = compile_merge(f"merge/{indices[0]}", variant, architecture)
            kernels.append(AttentionKernels(variant, tuple(indices), decode, merge, prefill))
    return kernels


_PURPOSES: tuple[tuple[Purpose, bool], ...] = (("decode", True), ("prefill", False))
"""And whether it splits."""


def refuse(variant: AttentionVariant, architecture: str, where: str) -> None:
    """Raise LoweringError if the variant cannot be compiled for the architecture."""
    if variant.pool == "fp8" and capability_of(architecture) < FP8_CAPABILITY:
        raise LoweringError(
            f"{where}: the attention kernel reads an fp8 cache only from sm_{FP8_CAPABILITY} on, not on {architecture}"
        )


def compile_attention(
    name: str,
    variant: AttentionVariant,
    purpose: Purpose,
    architecture: str,
    *,
    split: bool,
    shared_limit: int | None = None,
) -> TiledKernel:
    """Compile `paged_attention` for a variant, with the largest tile for a purpose that fits the shared memory.

    `shared_limit`: bytes of it; None is what the architecture has. Raises LoweringError if not even the smallest fits.
    """
    import_triton()
    from optimc_passes.emit.tensorrt_kernels import paged_attention_kernel

    capability = capability_of(architecture)
    limit = shared_bytes(capability) if shared_limit is None else shared_limit
    tile: AttentionTile | None = attention_tile(variant, purpose, capability)
    while tile is not None:
        what = attention_specialization(variant, tile, split=split)
        kernel = compile_source(name, paged_attention_kernel.paged_attention, what, architecture)
        if kernel.shared_bytes <= limit:
            return TiledKernel(kernel, tile)
        tile = smaller_tile(tile, variant.group)
    raise LoweringError(
        f"{name}: heads of {variant.head_dim} need {kernel.shared_bytes} bytes of shared memory on {architecture}, "
        f"which has {limit}"
    )


def compile_merge(name: str, variant: AttentionVariant, architecture: str) -> CompiledKernel:
    """Compile `merge_splits` for a variant."""
    import_triton()
    from optimc_passes.emit.tensorrt_kernels import merge_splits_kernel

    what = Specialization(
        signature={
            "parts": "*fp32",
            "log_sums": "*fp32",
            "rows": "i32",
            "splits": "i32",
            "out": f"*{TRITON_TYPES[variant.half]}",
        },
        constants={"MAX_SPLITS": MAX_SPLITS, "HEAD_DIM": variant.head_dim, "D": variant.padded_head_dim},
        aligned=("parts", "log_sums", "out"),
        num_warps=2,
    )
    return compile_source(name, merge_splits_kernel.merge_splits, what, architecture)


def attention_specialization(variant: AttentionVariant, tile: AttentionTile, *, split: bool) -> Specialization:
    """Return how `paged_attention` is specialized; arguments a variant has no use for become the constant None."""
    half, pool = (f"*{TRITON_TYPES[kind]}" for kind in (variant.half, variant.pool))
    scales = "*fp16" if variant.is_scaled else None
    types: dict[str, str | None] = {
        "q": half,
        **dict.fromkeys(("step_keys", "step_values", "key_pool", "value_pool"), pool),
        **dict.fromkeys(("key_pool_scales", "value_pool_scales", "step_key_scales", "step_value_scales"), scales),
        **dict.fromkeys(("query_start", "context_len", "block_table"), "*i32"),
        "positions": "*i64" if variant.has_tree else None,
        "tree_mask": "*u8" if variant.has_tree else None,
        **dict.fromkeys(("num_tokens", "num_seqs", "table_width", "mask_width"), "i32"),
        "out": "*fp32" if split else half,
        "log_sums": "*fp32" if split else None,
    }
    constants = {
        "SCALE": variant.scale,
        "SOFTCAP": variant.softcap,
        "WINDOW": variant.window,
        "HEADS": variant.num_heads,
        "KV_HEADS": variant.num_kv_heads,
        "HEAD_DIM": variant.head_dim,
        "BLOCK_SIZE": variant.block_size,
        "SPLIT": split,
        "M": tile.rows,
        "N": tile.keys,
        "D": variant.padded_head_dim,
    }
    return Specialization(
        signature={name: kind for name, kind in types.items() if kind is not None},
        constants=constants | {name: None for name, kind in types.items() if kind is None},
        aligned=tuple(name for name, kind in types.items() if kind is not None and kind.startswith("*")),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
