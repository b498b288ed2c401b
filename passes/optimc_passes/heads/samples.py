"""Text that a model wrote, and the hidden state each token was sampled from: on disk, in pieces that survive a build.

    samples.json    pieces that are finished: kind, lengths of samples, SHA-256 of what was written
    tokens.i32      token ids of all samples, one after another
    hidden.f16      their hidden states [P, d]

Letters: P tokens of all samples, d hidden size.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optimc.storage import storing, write_whole
from optimc_passes.artifact import derive_key

_INDEX, _TOKENS, _HIDDEN = "samples.json", "tokens.i32", "hidden.f16"
_LARGEST = np.float32(np.finfo(np.float16).max)


class Sample(NamedTuple):
    """One answer or continuation."""

    tokens: NDArray[np.int64]
    """[n]"""
    hidden: NDArray[np.float32]
    """[n, d]; token i was sampled from row i."""


@dataclass(frozen=True)
class Piece:
    """Samples that were written together."""

    kind: str
    """"chat" or "prose"."""
    lengths: tuple[int, ...]
    """Tokens of each sample."""
    openings: tuple[tuple[int, ...], ...] = ()
    """Users' turns that were answered."""
    sha256: tuple[str, str] = ("", "")
    """Of its part of the two files."""

    @property
    def tokens(self) -> int:
        """Tokens of all its samples."""
        return sum(self.lengths)


@dataclass(frozen=True)
class Samples:
    """All samples, read where they lie."""

    tokens: NDArray[np.int32]
    """[P]"""
    hidden: NDArray[np.float16]
    """[P, d], mapped."""
    starts: NDArray[np.int64]
    """[samples + 1]; sample i has rows starts[i] .. starts[i + 1]."""
    kinds: tuple[str, ...]
    """Of each sample."""

    def __len__(self) -> int:
        return len(self.kinds)

    def rows(self, index: int) -> slice:
        """Return where a sample lies."""
        return slice(int(self.starts[index]), int(self.starts[index + 1]))


@dataclass
class SampleStore:
    """The folder while it grows. What an earlier process finished is there already, unless it was harmed."""

    folder: Path
    width: int
    """d."""
    pieces: list[Piece] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        try:
            self.pieces = self._read_index()
            self._check()
        except (OSError, ValueError, KeyError, TypeError):
            # Absent, or harmed: started again.
            self.pieces = []

    def pieces_of(self, kind: str) -> list[Piece]:
        """Return the finished pieces of a kind, in order."""
        return [piece for piece in self.pieces if piece.kind == kind]

    def tokens_of(self, kind: str) -> int:
        """Return how many tokens of a kind there are."""
        return sum(piece.tokens for piece in self.pieces_of(kind))

    def append(self, kind: str, samples: Sequence[Sample], openings: Sequence[Sequence[int]] = ()) -> None:
        """Add a piece. A process killed at any moment leaves this state or the one before."""
        tokens = np.concatenate([np.zeros(0, np.int32), *(sample.tokens.astype(np.int32) for sample in samples)])
        clipped = [np.clip(sample.hidden, -_LARGEST, _LARGEST).astype(np.float16) for sample in samples]
        hidden = np.concatenate([np.zeros((0, self.width), np.float16), *clipped])
        assert hidden.shape == (len(tokens), self.width), (hidden.shape, len(tokens), self.width)
        row = sum(piece.tokens for piece in self.pieces)
        with storing("samples", self.folder):
            hashes = (self._write(_TOKENS, tokens, 4 * row), self._write(_HIDDEN, hidden, 2 * self.width * row))
            lengths = tuple(len(sample.tokens) for sample in samples)
            asked = tuple(tuple(map(int, opening)) for opening in openings)
            self.pieces.append(Piece(kind, lengths, asked, hashes))
            self._write_index()

    def open(self) -> Samples:
        """Return what there is, to be read."""
        lengths = [length for piece in self.pieces for length in piece.lengths]
        starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)
        kinds = tuple(piece.kind for piece in self.pieces for _ in piece.lengths)
        rows = int(starts[-1])
        if rows == 0:
            return Samples(np.zeros(0, np.int32), np.zeros((0, self.width), np.float16), starts, kinds)
        tokens = np.fromfile(self.folder / _TOKENS, np.int32, rows)
        hidden = np.memmap(self.folder / _HIDDEN, np.float16, "r", shape=(rows, self.width))
        return Samples(tokens, hidden, starts, kinds)

    def _write(self, name: str, array: NDArray[Any], offset: int) -> str:
        path = self.folder / name
        path.touch()
        data = np.ascontiguousarray(array).tobytes()
        with path.open("r+b") as file:
            file.truncate(offset)
            file.seek(offset)
            file.write(data)
        return hashlib.sha256(data).hexdigest()

    def _write_index(self) -> None:
        facts = {"width": self.width, "pieces": [vars(piece) for piece in self.pieces]}
        write_whole("samples", self.folder / _INDEX, json.dumps({"sha256": derive_key(facts), "facts": facts}))

    def _read_index(self) -> list[Piece]:
        written = json.loads((self.folder / _INDEX).read_bytes())
        facts = written["facts"]
        if written["sha256"] != derive_key(facts) or facts["width"] != self.width:
            raise ValueError(f"{self.folder / _INDEX} is not what was written")
        return [
            Piece(
                entry["kind"],
                tuple(entry["lengths"]),
                tuple(tuple(opening) for opening in entry["openings"]),
                (entry["sha256"][0], entry["sha256"][1]),
            )
            for entry in facts["pieces"]
        ]

    def _check(self) -> None:
        for column, (name, row_bytes) in enumerate(((_TOKENS, 4), (_HIDDEN, 2 * self.width))):
            with (self.folder / name).open("rb") as file:
                for piece, data in self._parts(file.read, row_bytes):
                    if hashlib.sha256(data).hexdigest() != piece.sha256[column]:
                        raise ValueError(f"{self.folder / name} is not what was written")

    def _parts(self, read: Any, row_bytes: int) -> Iterator[tuple[Piece, bytes]]:
        for piece in self.pieces:
            yield piece, read(piece.tokens * row_bytes)
