"""Integer codes in the bytes that kernels read: see `optimc.plan.cpu_program` for the layout.

Letters: N output features as stored, C input features, G features per group, g = ceil(C / G), P panels of 32 outputs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from optimc.plan.cpu_program import PANEL_ROWS, padded, padded_features
from optimc_passes.emit.cpu.panels import into_panels

_BLOCK_ROWS = 16


def packed_int_bytes(panels: int, features: int, group: int, bits: int, *, zeros: bool, wide: bool) -> int:
    """Return the size of a packed weight in bytes."""
    header = PANEL_ROWS * ((4 if wide else 2) + (1 if zeros else 0))
    codes = padded_features(features, group) * PANEL_ROWS * bits // 8
    return panels * (-(-features // group) * header + codes)


def pack_int(
    codes: NDArray[np.uint8],
    scales: NDArray[np.float32],
    zeros: NDArray[np.uint8] | None,
    *,
    bits: int,
    group: int,
    rows: NDArray[np.int64],
    wide: bool,
) -> NDArray[np.uint8]:
    """Return the packed bytes of `codes` [N, C], `scales` [N, g] and `zeros` [N, g].

    `rows` [P * 32] is the output at each place, -1 for padding. `wide` stores scales as float32; otherwise every one of
    them must be a float16.
    """
    assert bits in (4, 8), bits
    features = codes.shape[1]
    full, last = divmod(features, group)
    codes, scales = into_panels(codes, rows), into_panels(scales, rows)
    zeros = None if zeros is None else into_panels(zeros, rows)
    scale_dtype = np.float32 if wide else np.float16
    parts = []
    for first, count, size in ((0, full, group), (full, 1 if last else 0, last)):
        if not count:
            continue
        place = slice(first, first + count)
        parts.append(
            _pack_groups(
                codes[:, :, first * group : first * group + count * size],
                scales[:, :, place].astype(scale_dtype),
                None if zeros is None else zeros[:, :, place],
                bits,
                size,
            )
        )
    return np.concatenate(parts, axis=1).reshape(-1)


def fits_float16(scales: NDArray[np.float32]) -> bool:
    """Whether every scale is a float16 exactly."""
    with np.errstate(over="ignore"):
        return bool(np.array_equal(scales.astype(np.float16).astype(np.float32), scales))


def refine_groups(parts: NDArray[Any], features: int, group: int, finer: int) -> NDArray[Any]:
    """Repeat scales or zero points [N, g] for the smaller groups of `finer` features that `group` falls into."""
    assert group % finer == 0 or group >= features, (group, finer)
    return parts[:, np.arange(0, features, finer) // group]


def _pack_groups(
    codes: NDArray[np.uint8], scales: NDArray[Any], zeros: NDArray[np.uint8] | None, bits: int, size: int
) -> NDArray[np.uint8]:
    """Return [P, bytes] of equal groups: codes [P, 32, F * size], scales and zeros [P, 32, F]."""
    panels, _, count = scales.shape
    grouped = codes.reshape(panels, PANEL_ROWS, count, size)
    if size % 8:
        grouped = np.pad(grouped, ((0, 0), (0, 0), (0, 0), (0, padded(size) - size)))
    blocks = _nibbles(grouped) if bits == 4 else _bytes(grouped)
    fields = [np.ascontiguousarray(scales.transpose(0, 2, 1)).view(np.uint8)]
    if zeros is not None:
        fields.append(zeros.transpose(0, 2, 1))
    fields.append(blocks)
    return np.concatenate(fields, axis=2).reshape(panels, -1)


def _nibbles(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pack [P, 32, F, size] into [P, F, bytes]: eight features of a row in 4 bytes, feature j low and 4 + j high."""
    panels, _, count, size = codes.shape
    eights = codes.reshape(panels, PANEL_ROWS, count, size // 8, 2, 4)
    return _interleave(eights[..., 0, :] | eights[..., 1, :] << np.uint8(4))


def _bytes(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pack [P, 32, F, size] into [P, F, bytes]: four features of a row in 4 bytes."""
    panels, _, count, size = codes.shape
    return _interleave(codes.reshape(panels, PANEL_ROWS, count, size // 4, 4))


def _interleave(words: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Reorder [P, 32, F, words, 4] so that the same word of 16 rows lies together, for both halves of a panel."""
    panels, _, count, per_row, _ = words.shape
    whole = np.ascontiguousarray(words).view(np.uint32).reshape(panels, 2, _BLOCK_ROWS, count, per_row)
    return np.ascontiguousarray(whole.transpose(0, 3, 4, 1, 2)).view(np.uint8).reshape(panels, count, -1)
