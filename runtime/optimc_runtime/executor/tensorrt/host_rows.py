"""Rows that come back from the device, in page-locked memory that grows with what is asked for."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from optimc_runtime.executor.tensorrt.cuda import CudaDevice, Pointer

_FLOAT_BYTES = 4


class HostRows:
    """float32 rows [R, columns], used again for every step."""

    def __init__(self, device: CudaDevice, columns: int, num_rows: int) -> None:
        """Begin with room for `num_rows`."""
        self._device, self._columns = device, columns
        self._buffer = device.host_buffer(num_rows * columns * _FLOAT_BYTES)
        self._rows = self._buffer.view(np.float32).reshape(num_rows, columns)

    def take(self, num_rows: int) -> NDArray[np.float32]:
        """Return rows [num_rows, columns]. What an earlier call returned may change from now on."""
        if num_rows > len(self._rows):
            room = 1 << (num_rows - 1).bit_length()
            buffer = self._device.host_buffer(room * self._columns * _FLOAT_BYTES)
            self._device.release_host(self._buffer)
            self._buffer, self._rows = buffer, buffer.view(np.float32).reshape(room, self._columns)
        return self._rows[:num_rows]

    def download(self, places: NDArray[np.intp], source: Pointer) -> None:
        """Enqueue copying row i of `source` to row places[i], ascending: neighbours in one piece."""
        row_bytes = self._columns * _FLOAT_BYTES
        ends = np.flatnonzero(np.diff(places) != 1) + 1
        bounds = [0, *ends.tolist(), len(places)] if len(places) else []
        for first, last in pairwise(bounds):
            start = int(places[first])
            self._device.download(self._rows[start : start + last - first], Pointer(source + first * row_bytes))

    def close(self) -> None:
        """Unlock the memory; arrays that were returned keep it alive."""
        self._device.release_host(self._buffer)
