"""How attention is split into two TensorRT plugins: their tensors, shapes, grids and extra arguments.

A plugin of the ahead-of-time kind is one launch without a workspace, so the parts of a split attention are an ordinary
tensor between two plugins. Sizes are written with + * // and < between a size and an integer, in this order: that is
what holds for Python's integers as well as for TensorRT's symbols, the fake ones it asks for types with included.

Letters: T tokens, B sequences, W blocks of a sequence, Q mask columns, H heads, Hkv key/value heads, D head dim, Z
parts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from optimc_passes.emit.tensorrt_kernels.attention_tiles import MAX_SPLITS, WANTED_PROGRAMS, AttentionTile
from optimc_passes.emit.tensorrt_kernels.attention_variant import AttentionVariant

NAMESPACE = "optimc"

PluginType = Literal["FP32", "FP16", "BF16", "INT8", "FP8", "INT32", "INT64", "BOOL"]
"""TensorRT's names of types in autotune combinations."""

_TYPES: dict[str, PluginType] = {"float16": "FP16", "bfloat16": "BF16", "int8": "INT8", "fp8": "FP8"}

Sizes = Mapping[str, Sequence[Any]]
"""Shape of each input, by its name: integers or symbols."""


@dataclass(frozen=True)
class Launch:
    """A grid and the int32 arguments between inputs and outputs: integers or symbols."""

    grid: tuple[Any, Any, Any]
    extra: tuple[Any, ...]


def plugin_names(variant: AttentionVariant, capability: int) -> tuple[str, str]:
    """Return the names of a variant's plugins, attention and merge: equal kernels have equal names, others do not."""
    digest = hashlib.sha256(f"{variant} {capability}".encode()).hexdigest()[:12]
    return f"paged_attention_{digest}", f"merge_splits_{digest}"


def attention_inputs(variant: AttentionVariant) -> dict[str, PluginType]:
    """Return name and type of the attention plugin's inputs, in the kernel's order."""
    scales = ("key_pool_scales", "value_pool_scales", "step_key_scales", "step_value_scales")
    return {
        "q": _TYPES[variant.half],
        **dict.fromkeys(("step_keys", "step_values", "key_pool", "value_pool"), _TYPES[variant.pool]),
        **(dict.fromkeys(scales, "FP16") if variant.is_scaled else {}),
        **dict.fromkeys(("query_start", "context_len", "block_table"), "INT32"),
        **({"positions": "INT64", "tree_mask": "BOOL"} if variant.has_tree else {}),
    }


ATTENTION_OUTPUTS: dict[str, PluginType] = {"parts": "FP32", "log_sums": "FP32"}
"""[Z, T, H*D] and [Z, T, H]; also the merge plugin's inputs."""


def merge_outputs(variant: AttentionVariant) -> dict[str, PluginType]:
    """Return the merge plugin's output, [T, H*D]."""
    return {"out": _TYPES[variant.half]}


def attention_shapes(variant: AttentionVariant, sizes: Sizes) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the shapes of `ATTENTION_OUTPUTS`."""
    tokens, parts = sizes["q"][0], num_splits(variant, sizes)
    return (parts, tokens, variant.num_heads * variant.head_dim), (parts, tokens, variant.num_heads)


def attention_launch(variant: AttentionVariant, tile: AttentionTile, sizes: Sizes) -> Launch:
    """Return the launch of `paged_attention` with SPLIT."""
    tokens, sequences = sizes["q"][0], sizes["context_len"][0]
    tiles = tokens // (tile.rows // variant.group) + sequences
    mask_width = sizes["tree_mask"][1] if variant.has_tree else 0
    return Launch(
        (tiles, variant.num_kv_heads, num_splits(variant, sizes)),
        (tokens, sequences, sizes["block_table"][1], mask_width),
    )


def merge_launch(variant: AttentionVariant, sizes: Sizes) -> Launch:
    """Return the launch of `merge_splits`."""
    parts, tokens, heads = sizes["log_sums"]
    return Launch((tokens * variant.num_heads, 1, 1), (tokens * heads, parts))


def num_splits(variant: AttentionVariant, sizes: Sizes) -> Any:
    """Return Z, a power of two up to MAX_SPLITS, so that programs are about WANTED_PROGRAMS, or as many as there are.

    It does not depend on the tile TensorRT picks, since shapes cannot: it counts the small tiles of decode steps.
    """
    queries = max(16, variant.group) // variant.group
    programs = (sizes["q"][0] // queries + sizes["context_len"][0]) * variant.num_kv_heads
    # Each step down doubles the parts: 1 + 1 + 2 + 4 + …, a term for each bound the programs stay under.
    parts = (programs < WANTED_PROGRAMS // 2 + 1) + 1
    doubled = 2
    while doubled < MAX_SPLITS:
        parts = parts + (programs < WANTED_PROGRAMS // (2 * doubled) + 1) * doubled
        doubled *= 2
    return parts
