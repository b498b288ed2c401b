"""Activations of all calibration tokens at one place of a model, in memory or in a file.

Letters: T tokens of a window, C width.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from optimc.storage import storing
from optimc_passes.walk.budget import Budget

_BLOCK = 512
"""Columns of a second moment computed at a time; what lies below the diagonal of blocks is mirrored."""


class Activations:
    """float32 [tokens, width], kept as the rows of one window after another.

    In memory where the budget has room, else in a file that is read and written a window at a time: mapped pages would
    count as resident. Memory comes from torch, whose alignment does not differ from run to run, since products of
    differently aligned matrices may differ in their last bits.
    """

    def __init__(self, lengths: Sequence[int], width: int, *, budget: Budget, folder: Path | None) -> None:
        self.lengths = tuple(lengths)
        """Tokens of each window."""
        self.width = width
        self._starts = np.concatenate([[0], np.cumsum(self.lengths)]).astype(int).tolist()
        self._folder = folder or Path(tempfile.gettempdir())
        self._memory: torch.Tensor | None = None
        self._file: int | None = None
        if budget.take(self.nbytes):
            self._memory = torch.empty(self.tokens, width)
            weakref.finalize(self, budget.give_back, self.nbytes)
        else:
            with storing("activations", self._folder):
                self._file, path = tempfile.mkstemp(prefix="activations-", dir=self._folder)
                # Without a name the file is gone when nobody has it open, whatever becomes of this process.
                Path(path).unlink()
                os.ftruncate(self._file, self.nbytes)
            weakref.finalize(self, os.close, self._file)

    @property
    def tokens(self) -> int:
        """Tokens of all windows."""
        return int(self._starts[-1])

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.tokens * self.width * 4

    @property
    def in_memory(self) -> bool:
        """Whether they are in memory and not in a file."""
        return self._memory is not None

    def window(self, index: int) -> NDArray[np.float32]:
        """Return the rows [T, width] of a window; not to be written to."""
        rows: NDArray[np.float32] = self.tensor(index).numpy()
        return rows

    def tensor(self, index: int) -> torch.Tensor:
        """Return the rows [T, width] of a window; not to be written to."""
        start, length = self._starts[index], self.lengths[index]
        if self._memory is not None:
            return self._memory[start : start + length]
        rows = torch.empty(length, self.width)
        assert self._file is not None
        _read_exactly(self._file, _bytes(rows), start * self.width * 4)
        return rows

    def put(self, index: int, rows: NDArray[np.float32] | torch.Tensor) -> None:
        """Store the rows [T, width] of a window."""
        start, length = self._starts[index], self.lengths[index]
        tensor = rows if isinstance(rows, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(rows, np.float32))
        assert tensor.shape == (length, self.width), (tensor.shape, length, self.width)
        if self._memory is not None:
            self._memory[start : start + length] = tensor
            return
        assert self._file is not None
        with storing("activations", self._folder):
            _write_exactly(self._file, _bytes(tensor.contiguous()), start * self.width * 4)

    def save(self, path: Path) -> None:
        """Write everything to a file: float32 numbers, nothing else."""
        with path.open("wb") as file:
            for index in range(len(self.lengths)):
                file.write(_bytes(self.tensor(index)))

    @classmethod
    def load(
        cls, path: Path, lengths: Sequence[int], width: int, *, budget: Budget, folder: Path | None
    ) -> Activations:
        """Return what `save` wrote. Raises ValueError if the file's size is another."""
        loaded = cls(lengths, width, budget=budget, folder=folder)
        if path.stat().st_size != loaded.nbytes:
            raise ValueError(f"{path}: {path.stat().st_size} bytes, want {loaded.nbytes}")
        with path.open("rb") as file:
            for index, length in enumerate(lengths):
                rows = torch.empty(length, width)
                file.readinto(_bytes(rows))
                loaded.put(index, rows)
        return loaded


def second_moment(x: Activations, other: Activations | None = None) -> NDArray[np.float32]:
    """Return the sum over all tokens of x^T x [C, C], or of x^T other [C, C], in float32, windows in their order."""
    assert other is None or (other.width == x.width and other.lengths == x.lengths)
    total = torch.zeros(x.width, x.width)
    for index in range(len(x.lengths)):
        rows = x.tensor(index)
        if other is not None:
            total.addmm_(rows.T, other.tensor(index))
            continue
        for start in range(0, x.width, _BLOCK):
            end = min(start + _BLOCK, x.width)
            total[start:end, start:].addmm_(rows[:, start:end].T, rows[:, start:])
    if other is None:
        for start in range(0, x.width, _BLOCK):
            end = min(start + _BLOCK, x.width)
            total[end:, start:end] = total[start:end, end:].T
    moment: NDArray[np.float32] = total.numpy()
    return moment


def _bytes(rows: torch.Tensor) -> memoryview:
    return rows.numpy().data.cast("B")


def _read_exactly(file: int, into: memoryview, offset: int) -> None:
    done = 0
    while done < len(into):
        count = os.preadv(file, [into[done:]], offset + done)
        assert count > 0, "the file is shorter than it was made"
        done += count


def _write_exactly(file: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(file, data[done:], offset + done)
