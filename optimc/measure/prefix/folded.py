"""Text without what editors and clients change unasked: whitespace, the shape of quotes, how accents are written.

Prompts are compared folded, so that a difference of that kind does not hide what is alike behind it; the places in the
text itself stay known.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from optimc.measure.prefix.rendered import codes_of
from optimc.measure.prefix.trie import Units

_SPACES = np.array(
    [
        *range(9, 14),
        *range(28, 33),
        0x85,
        0xA0,
        0x1680,
        *range(0x2000, 0x200C),
        0x2028,
        0x2029,
        0x202F,
        0x205F,
        0x3000,
        0xFEFF,
    ],
    np.int32,
)
_QUOTES = {0x2018: 0x27, 0x2019: 0x27, 0x201A: 0x27, 0x201C: 0x22, 0x201D: 0x22, 0x201E: 0x22, 0xAB: 0x22, 0xBB: 0x22}
_TABLE = np.arange(0x3001, dtype=np.int32)
_TABLE[[code for code in _SPACES if code <= 0x3000]] = -1
for _fancy, _plain in _QUOTES.items():
    _TABLE[_fancy] = _plain
_MARK = 0xFEFF
_HASH_BASE = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True, eq=False)
class Folded:
    """A text's letters: `codes` [n] code points, `places` [n] the character of the text each begins at, `length` of the
    text."""

    codes: Units
    places: NDArray[np.int64]
    length: int

    def place(self, index: int) -> int:
        """Return the character at which letter `index` begins; the end of the text after the last."""
        return int(self.places[index]) if index < len(self.places) else self.length

    def index(self, char: int) -> int:
        """Return how many letters begin before character `char`."""
        return int(np.searchsorted(self.places, char))


def fold(text: str) -> Folded:
    """Return the letters of a text."""
    if unicodedata.is_normalized("NFC", text):
        codes, places = codes_of(text), None
    else:
        codes, places = _composed(text)
    small = codes < len(_TABLE)
    mapped = np.where(small, _TABLE[np.where(small, codes, 0)], codes)
    kept = np.flatnonzero((mapped >= 0) & (codes != _MARK))
    return Folded(mapped[kept], kept if places is None else places[kept], len(text))


def window_hashes(codes: Units, width: int) -> NDArray[np.uint64]:
    """Return the hash of each run of `width` codes, [n - width + 1]: equal for equal runs, wherever they stand."""
    count = len(codes) - width + 1
    if count <= 0:
        return np.zeros(0, np.uint64)
    powers, inverses = _powers(len(codes))
    sums = np.zeros(len(codes) + 1, np.uint64)
    np.cumsum((codes.astype(np.uint64) + np.uint64(1)) * powers[: len(codes)], out=sums[1:])
    hashes = (sums[width:] - sums[:count]) * inverses[:count]
    # The low bits of a sum of products are weak; those of this are not.
    hashes ^= hashes >> np.uint64(29)
    hashes *= np.uint64(0xBF58476D1CE4E5B9)
    hashes ^= hashes >> np.uint64(32)
    return hashes


_KNOWN: list[NDArray[np.uint64]] = [np.ones(1, np.uint64), np.ones(1, np.uint64)]


def _powers(count: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return the powers of an odd base and their inverses modulo 2**64, at least `count` of each; made once."""
    if len(_KNOWN[0]) < count:
        size = max(count, 2 * len(_KNOWN[0]))
        inverse = np.uint64(pow(int(_HASH_BASE), -1, 1 << 64))
        for at, base in enumerate((_HASH_BASE, inverse)):
            factors = np.full(size, base, np.uint64)
            factors[0] = 1
            _KNOWN[at] = np.cumprod(factors, dtype=np.uint64)
    return _KNOWN[0], _KNOWN[1]


def _composed(text: str) -> tuple[Units, NDArray[np.int64]]:
    """Return the text in Unicode's form C, [n] code points, and the character of `text` each comes from."""
    codes: list[int] = []
    places: list[int] = []
    start = 0
    while start < len(text):
        end = start + 1
        while end < len(text) and unicodedata.combining(text[end]):
            end += 1
        for char in unicodedata.normalize("NFC", text[start:end]):
            codes.append(ord(char))
            places.append(start)
        start = end
    return np.array(codes, np.int32), np.array(places, np.int64)
