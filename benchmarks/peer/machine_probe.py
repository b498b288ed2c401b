"""The state a virtual machine is in right now: nanoseconds per thread barrier, gigabytes read per second.

Virtual cores move: results taken in one state must not be compared with results of another. See machine_probe.c.
"""

from __future__ import annotations

import ctypes
import math
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

SOURCE = Path(__file__).with_name("machine_probe.c")
BARRIER_ROUNDS = 2_000
"""Short enough to pass between two interruptions on a busy machine."""
MAX_THREADS = 64  # as in machine_probe.c
READ_BYTES = 256 << 20
"""Beyond any cache."""
TRIES, MAX_S = 50, 0.2
"""How often each is tried, and after which time not again. The fastest counts: what disturbs only ever slows."""


@dataclass(frozen=True)
class MachineState:
    """One look at the machine."""

    barrier_ns: float
    read_gb_per_s: float

    def __str__(self) -> str:
        return f"barrier {self.barrier_ns:.0f} ns, {self.read_gb_per_s:.0f} GB/s"

    def to_json(self) -> dict[str, float]:
        return {name: round(value, 1) for name, value in asdict(self).items()}


class MachineProbe:
    """Measures with all cores this process may use; needs a C compiler. Half a second per call."""

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "machine_probe.so"
            command = ["cc", "-O3", "-march=native", "-pthread", "-shared", "-fPIC", str(SOURCE), "-o", str(library)]
            subprocess.run(command, check=True)
            self._library = ctypes.CDLL(str(library))
        self._library.probe_barrier.restype = ctypes.c_double
        self._library.probe_read.restype = ctypes.c_double
        cores = sorted(os.sched_getaffinity(0))[:MAX_THREADS]
        self._threads = len(cores)
        self._cores = (ctypes.c_int * len(cores))(*cores)
        self._words = np.ones(READ_BYTES // 8, np.uint64)

    def __call__(self) -> MachineState:
        return MachineState(1e9 * _fastest(self._barrier_s) / BARRIER_ROUNDS, READ_BYTES / _fastest(self._read_s) / 1e9)

    def _barrier_s(self) -> float:
        return float(self._library.probe_barrier(self._threads, self._cores, BARRIER_ROUNDS))

    def _read_s(self) -> float:
        words = self._words.ctypes.data_as(ctypes.c_void_p)
        return float(self._library.probe_read(self._threads, self._cores, words, ctypes.c_size_t(READ_BYTES)))


def _fastest(measure: Callable[[], float]) -> float:
    started_s = time.perf_counter()
    best_s = math.inf
    for _ in range(TRIES):
        best_s = min(best_s, measure())
        if time.perf_counter() - started_s > MAX_S:
            break
    return best_s
