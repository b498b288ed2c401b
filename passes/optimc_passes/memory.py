"""How much memory a stretch of work took at its highest."""

from __future__ import annotations

import ctypes
import resource
import sys
from pathlib import Path
from types import TracebackType

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


class PeakMemory:
    """Context manager; `peak_bytes` afterwards says how far the resident size rose above where it began.

    On Linux the kernel's high-water mark is reset at the start, so the figure belongs to this stretch; touched pages
    of mapped files count. Elsewhere, and where the kernel refuses, the mark is the process's, so the figure is a
    lower bound: 0 if an earlier stretch needed more.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._start = 0

    def __enter__(self) -> PeakMemory:
        try:
            _CLEAR_REFS.write_text("5")
            self._start = _resident("VmRSS")
        except OSError:
            self._start = _high_water()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.peak_bytes = max(0, _high_water() - self._start)


def return_free_memory() -> None:
    """Give freed memory back to the system where the C library holds on to it.

    glibc keeps pieces of up to 32 MiB: a long build, whose arrays have many sizes, would grow by what lies between.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def resident_bytes() -> int:
    """Return what the process has resident now; where the system does not say, the most it ever had."""
    try:
        return _resident("VmRSS")
    except OSError:
        return _high_water()


def _high_water() -> int:
    try:
        return _resident("VmHWM")
    except OSError:
        # Kilobytes, but bytes on macOS.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _resident(field: str) -> int:
    """Return a size of /proc/self/status in bytes. Raises OSError if there is none."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_STATUS} has no {field}")
