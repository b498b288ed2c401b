"""How large the attention kernel's tiles are, by what it is for and where it runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from optimc_passes.emit.tensorrt_kernels.attention_variant import AttentionVariant

Purpose = Literal["decode", "prefill"]
"""Few queries per sequence, where reading the cache is the work, or many, where multiplying is."""

MAX_SPLITS = 32
"""Most parts a sequence's keys are split into."""

WANTED_PROGRAMS = 256
"""About two for each multiprocessor of the large GPUs of these architectures (108 to 148)."""

_SHARED_BYTES = {86: 101376, 89: 101376, 120: 101376, 121: 101376, 87: 166912, 80: 166912}
"""Shared memory of one block; 232448 on the others."""


@dataclass(frozen=True)
class AttentionTile:
    """A tile's size and how many threads work on it."""

    rows: int
    """M: queries times the heads of a group, a power of two of at least 16, the tensor cores' smallest."""
    keys: int
    """N."""
    num_warps: int
    num_stages: int
    """Tiles of keys and values in flight."""


def shared_bytes(capability: int) -> int:
    """Return the shared memory one block may have."""
    return _SHARED_BYTES.get(capability, 232448)


def attention_tile(variant: AttentionVariant, purpose: Purpose, capability: int) -> AttentionTile:
    """Return the tile for a compute capability (times ten).

    Decode takes the fewest rows that hold a group, to leave registers to loads in flight. Prefill takes as many as
    compile without spilling registers: every row more is one for which keys are not read again.
    """
    group = 1 << (variant.group - 1).bit_length()
    wide = variant.padded_head_dim > 128
    if purpose == "decode":
        rows, keys, num_warps = max(16, group), 32 if wide else 64, 4
    else:
        rows, keys, num_warps = _prefill(variant, wide, has_wgmma=90 <= capability < 120)
        rows = max(rows, group)
    tile_bytes = 2 * keys * variant.padded_head_dim * (1 if variant.is_scaled else 2)
    # Half the memory, so that two blocks share a multiprocessor and one computes while the other waits. Decode keeps
    # one tile less than stages there; prefill may keep as many, and its queries.
    num_stages = shared_bytes(capability) // 2 // tile_bytes + (purpose == "decode")
    return AttentionTile(rows, keys, num_warps, max(2, min(4, num_stages)))


def _prefill(variant: AttentionVariant, wide: bool, *, has_wgmma: bool) -> tuple[int, int, int]:
    """Return rows, keys and warps. Without warp-group products, keys pass through registers, codes twice as wide."""
    has_masks = variant.has_tree or variant.window > 0
    if wide:
        return 64, 32, 8
    if has_wgmma:
        return 128, 32 if variant.is_scaled else 64, 8
    if variant.is_scaled or has_masks or variant.softcap > 0:
        return 64, 32, 4
    return 128, 32, 8


def smaller_tile(tile: AttentionTile, least_rows: int) -> AttentionTile | None:
    """Return the next tile to try when one needs too much shared memory; None if nothing smaller would be of use."""
    if tile.num_stages > 2:
        return replace(tile, num_stages=tile.num_stages - 1)
    if tile.keys > 32:
        return replace(tile, keys=tile.keys // 2)
    if tile.num_stages > 1:
        return replace(tile, num_stages=1)
    if tile.rows // 2 >= max(16, least_rows):
        return replace(tile, rows=tile.rows // 2)
    return replace(tile, keys=tile.keys // 2) if tile.keys > 16 else None
