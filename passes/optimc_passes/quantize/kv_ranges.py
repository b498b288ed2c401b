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
_CODES: dict[KvCode, tuple[int, int]] = {"int8": (-127, 127), "int4": (0, 15)}
"""Smallest and largest code."""

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


class Turning(NamedTuple):
    """How far RoPE will turn pairs of channels beyond the positions that are looked at.

    Attention depends on differences of positions alone, so a key further on is one that was seen, turned: no longer
    text is needed to know its range.
    """

    radians: NDArray[np.float64]
    """[pairs], from one position to the next; pair i is channels i and i + pairs."""
    seen: int
    """Positions of a window."""
    served: int
    """Positions that the scales are to hold."""

    def angles(self) -> NDArray[np.float64]:
        """Return [steps, pairs]: what pairs are turned by further on; 0 for those that turned once around already."""
        slow = np.abs(self.radians) * self.seen < 2 * np.pi
        most = np.clip(self.radians * max(self.served - self.seen, 0), -2 * np.pi, 2 * np.pi)
        return np.linspace(0, 1, _TURNS)[1:, None] * np.where(slow, most, 0)


_TURNS = 33
"""Angles tried per pair, 0 and at most a full turn among them: the range between two is missed by under 1 %."""


class KeyRange:
    """Smallest and largest key of each channel so far, and further on if it is told how keys turn."""

    def __init__(self, turning: Turning | None = None) -> None:
        self._angles = None if turning is None else turning.angles()
        self._low: NDArray[np.float32] | None = None
        self._high: NDArray[np.float32] | None = None

    def see(self, keys: NDArray[np.float32]) -> None:
        """Take in keys [Hkv, T, D]. Raises ValueError if one is not finite."""
        low, high = keys.min(axis=1), keys.max(axis=1)
        if not (np.isfinite(low).all() and np.isfinite(high).all()):
            raise ValueError("a key is not finite")
        self._include(low, high)
        if self._angles is not None:
            self._turn(keys, self._angles)

    def _turn(self, keys: NDArray[np.float32], angles: NDArray[np.float64]) -> None:
        (slow,) = np.nonzero(angles[-1])
        low, high = keys.min(axis=1), keys.max(axis=1)
        first, second = keys[..., slow], keys[..., slow + angles.shape[1]]
        for angle in angles[:, slow]:
            cosine, sine = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
            for channels, turned in (
                (slow, first * cosine - second * sine),
                (slow + angles.shape[1], second * cosine + first * sine),
            ):
                low[:, channels] = np.minimum(low[:, channels], turned.min(axis=1))
                high[:, channels] = np.maximum(high[:, channels], turned.max(axis=1))
        self._include(low, high)

    def _include(self, low: NDArray[np.float32], high: NDArray[np.float32]) -> None:
        self._low = low if self._low is None else np.minimum(self._low, low)
        self._high = high if self._high is None else np.maximum(self._high, high)

    def scales(self, dtype: KvCode) -> KeyScales:
        """Return scales that just hold everything seen: max|k| / 127 for int8, (max - min) / 15 for int4."""
        assert self._low is not None and self._high is not None, "nothing was seen"  # noqa: PT018
        if dtype == "int8":
            largest: NDArray[np.float32] = np.maximum(-self._low, self._high)
            return KeyScales(_floored(largest, 127), None)
        return KeyScales(_floored(self._high - self._low, 15), self._low)


def assumed_scales(num_kv_heads: int, head_dim: int, dtype: KvCode) -> KeyScales:
    """Return scales for keys nobody looked at: all channels hold [-16, 16]."""
    seen = KeyRange()
    corner = np.full((num_kv_heads, 1, head_dim), DEFAULT_LARGEST_KEY, np.float32)
    seen.see(np.concatenate([corner, -corner], axis=1))
    return seen.scales(dtype)


def round_by_channel(keys: NDArray[np.float32], by: KeyScales, dtype: KvCode) -> NDArray[np.float32]:
    """Return keys [Hkv, T, D] as a cache with these scales gives them back."""
    assert (by.minimums is not None) == (dtype == "int4"), dtype
    scales = by.scales[:, None]
    minimums = np.float32(0) if by.minimums is None else by.minimums[:, None]
    low, high = _CODES[dtype]
    back: NDArray[np.float32] = np.clip(np.rint((keys - minimums) / scales), low, high) * scales + minimums
    return back


def round_by_token(rows: NDArray[np.float32], dtype: KvCode) -> NDArray[np.float32]:
    """Return keys or values [..., D] as a cache with one scale per token and head gives them back."""
    if dtype == "int8":
        minimums = np.zeros_like(rows[..., :1])
        scales = np.abs(rows).max(axis=-1, keepdims=True) / np.float32(127)
    else:
        minimums = rows.min(axis=-1, keepdims=True)
        scales = (rows.max(axis=-1, keepdims=True) - minimums) / np.float32(15)
    low, high = _CODES[dtype]
    codes = np.rint(np.divide(rows - minimums, scales, out=np.zeros_like(rows), where=scales > 0))
    back: NDArray[np.float32] = np.clip(codes, low, high) * scales + minimums
    return back


def bytes_per_token(num_kv_heads: int, head_dim: int, bits: int, *, channel_keys: bool) -> int:
    """Return the bytes of one token's keys and values with their scales, without the padding of a target's blocks."""
    scales = 0 if bits > 8 else (1 if channel_keys else 2) * (4 if bits == 8 else 8)
    return num_kv_heads * (2 * head_dim * bits // 8 + scales)


def _floored(reach: NDArray[np.float32], steps: int) -> NDArray[np.float32]:
    """Return scales [Hkv, D] of `steps` to what channels reach.

    Those at rest get a share of their head's largest, and 1 where all are at rest.
    """
    scales = reach / np.float32(steps)
    largest = scales.max(axis=-1, keepdims=True)
    floor = np.where(largest > 0, largest * np.float32(_SMALLEST_SHARE), np.float32(1))
    floored: NDArray[np.float32] = np.maximum(scales, floor)
    return floored
