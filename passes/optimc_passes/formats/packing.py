"""Codes of a few bits in 32-bit words, as checkpoint formats store them. Pure arithmetic.

GPTQ and compressed-tensors write one stream of bits, least significant first: code j occupies bits j*b .. j*b + b - 1
of the words taken together, so that codes of 3 bits straddle words. AWQ shuffles each eight codes of 4 bits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

WORD_BITS = 32

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Nibble i of an AWQ word, from the least significant, holds code AWQ_ORDER[i] of its eight."""

_PIECE_BYTES = 1 << 26
"""Bits that are spread out at a time, one byte each."""


def packed_words(count: int, bits: int) -> int:
    """Return how many 32-bit words `count` codes of `bits` bits take; the last may be filled in part."""
    return -(-count * bits // WORD_BITS)


def pack_bits(codes: NDArray[np.uint8], bits: int) -> NDArray[np.int32]:
    """Pack codes [R, n], each 0 .. 2**bits - 1, into words [R, ceil(n * bits / 32)], row by row."""
    assert codes.ndim == 2, codes.shape
    assert 1 <= bits <= 8, bits
    rows, count = codes.shape
    words = packed_words(count, bits)
    packed = np.empty((rows, words * 4), np.uint8)
    for start, stop in _pieces(rows, count * 8):
        stream = np.zeros((stop - start, words * WORD_BITS), np.uint8)
        spread = np.unpackbits(codes[start:stop, :, None], axis=2, count=bits, bitorder="little")
        stream[:, : count * bits] = spread.reshape(stop - start, count * bits)
        packed[start:stop] = np.packbits(stream, axis=1, bitorder="little")
    return packed.view("<i4").astype(np.int32, copy=False)


def unpack_bits(words: NDArray[np.int32], bits: int, count: int) -> NDArray[np.uint8]:
    """Return the codes [R, count] of words [R, w]; what is left of the last word is ignored."""
    assert words.ndim == 2, words.shape
    assert words.shape[1] * WORD_BITS >= count * bits, (words.shape, count, bits)
    rows = len(words)
    codes = np.empty((rows, count), np.uint8)
    octets = np.ascontiguousarray(words, "<i4").view(np.uint8)
    for start, stop in _pieces(rows, count * 8):
        stream = np.unpackbits(octets[start:stop], axis=1, count=count * bits, bitorder="little")
        codes[start:stop] = np.packbits(stream.reshape(stop - start, count, bits), axis=2, bitorder="little")[..., 0]
    return codes


def pack_awq(codes: NDArray[np.uint8]) -> NDArray[np.int32]:
    """Pack codes of 4 bits [R, n], n a multiple of 8, into words [R, n / 8] in AWQ's order."""
    rows, count = codes.shape
    assert count % 8 == 0, codes.shape
    shuffled = codes.reshape(rows, count // 8, 8)[:, :, AWQ_ORDER]
    return pack_bits(shuffled.reshape(rows, count), 4)


def unpack_awq(words: NDArray[np.int32]) -> NDArray[np.uint8]:
    """Return the codes [R, 8 * w] of words [R, w] in AWQ's order."""
    rows, count = words.shape
    shuffled = unpack_bits(words, 4, count * 8).reshape(rows, count, 8)
    codes = np.empty_like(shuffled)
    codes[:, :, AWQ_ORDER] = shuffled
    return codes.reshape(rows, count * 8)


def _pieces(rows: int, bytes_per_row: int) -> list[tuple[int, int]]:
    """Return ranges of rows small enough to be spread out together."""
    step = max(1, _PIECE_BYTES // max(1, bytes_per_row))
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]
