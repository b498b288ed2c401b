"""Number formats of a KV cache as arithmetic: scales of key channels from what was seen, and what rounding does.

Keys are taken as the cache holds them, after RoPE. That mixes the two channels of a pair, so a channel that a bias
makes large makes its pair large too; both get scales that fit. Values have one scale per token and head, as keys have
it where their channels have none (KIVI, arXiv 2402.02750, finds the same division).

Letters: Hkv key/value heads, T tokens, D channels of a head.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

KvCode = Literal["int8", "int4"]

DEFAULT_LARGEST_KEY = 16.0
"""Largest magnitude of a key that is assumed where nothing was measured."""
_SMALLEST_SHARE = 2.0**-10
"""A channel's scale is at least this share of its head's largest: one that calibration saw at rest is not clamped to
nothing when it moves."""


class KeyScales(NamedTuple):
    """A key's channel reads back as code * scale + minimum, saturated."""

    scales: NDArray[np.float32]
    """[Hkv, D], positive."""
    minimums: NDArray[np.float32] | None
    """[Hkv, D] for int4; None for int8, whose codes are signed."""


class KeyRange:
    """Smallest and largest key of each channel so far."""

    def __init__(self) -> None:
        self._low: NDArray[np.float32] | None = None
        self._high: NDArray[np.float32] | None = None

    def see(self, keys: NDArray[np.float32]) -> None:
        """Take in keys [Hkv, T, D]. Raises ValueError if one is not finite."""
        low, high = keys.min(axis=1), keys.max(axis=1)
        if not (np.isfinite(low).all() and np.isfinite(high).all()):
            raise ValueError("a key is not finite")
        self._low = low if self._low is None else np.minimum(self._low, low)
        self._high = high if self._high is None else np.maximum(self._high, high)

    def scales(self, dtype: KvCode) -> KeyScales:
        """Return scales that just hold everything seen: max|k| / 127 for int8, (max - min) / 15 for int4."""
        assert self._low is not None and self._high is not None, "nothing was seen"  # noqa: PT018
        if dtype == "int8":
            return KeyScales(_floored(np.maximum(-self._low, self._high) / np.float32(127)), None)
        return KeyScales(_floored((self._high - self._low) / np.float32(15)), self._low)


def assumed_scales(num_kv_heads: int, head_dim: int, dtype: KvCode) -> KeyScales:
    """Return scales for keys nobody looked at: all channels hold [-16, 16]."""
    seen = KeyRange()
    corner = np.full((num_kv_heads, 1, head_dim), DEFAULT_LARGEST_KEY, np.float32)
    seen.see(np.concatenate([corner, -corner], axis=1))
    return seen.scales(dtype)


def round_by_channel(keys: NDArray[np.float32], by: KeyScales, dtype: KvCode) -> NDArray[np.float32]:
    """Return keys [Hkv, T, D] as a cache with these scales gives them back."""
    scales = by.scales[:, None]
    if by.minimums is None:
        return (np.clip(np.rint(keys / scales), -127, 127) * scales).astype(np.float32)
    assert dtype == "int4"
    minimums = by.minimums[:, None]
    return (np.clip(np.rint((keys - minimums) / scales), 0, 15) * scales + minimums).astype(np.float32)


def round_by_token(rows: NDArray[np.float32], dtype: KvCode) -> NDArray[np.float32]:
    """Return keys or values [..., D] as a cache with one scale per token and head gives them back."""
    if dtype == "int8":
        scales = np.abs(rows).max(axis=-1, keepdims=True) / np.float32(127)
        codes = np.rint(np.divide(rows, scales, out=np.zeros_like(rows), where=scales > 0))
        return (np.clip(codes, -127, 127) * scales).astype(np.float32)
    low = rows.min(axis=-1, keepdims=True)
    scales = (rows.max(axis=-1, keepdims=True) - low) / np.float32(15)
    codes = np.rint(np.divide(rows - low, scales, out=np.zeros_like(rows), where=scales > 0))
    return (np.clip(codes, 0, 15) * scales + low).astype(np.float32)


def bytes_per_token(num_kv_heads: int, head_dim: int, bits: int, *, channel_keys: bool) -> int:
    """Return the bytes of one token's keys and values with their scales, without the padding of a target's blocks."""
    scales = 0 if bits > 8 else (1 if channel_keys else 2) * (4 if bits == 8 else 8)
    return num_kv_heads * (2 * head_dim * bits // 8 + scales)


def _floored(scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return scales [Hkv, D] with channels at rest given a share of their head's largest; 1 where all are at rest."""
    largest = scales.max(axis=-1, keepdims=True)
    floor = np.where(largest > 0, largest * np.float32(_SMALLEST_SHARE), np.float32(1))
    return np.maximum(scales, floor).astype(np.float32)
