"""Processor time and memory of whatever serves, while it is measured. From /proc; elsewhere nothing is known."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from optimc.errors import ConfigError, Fault

PERIOD_S = 0.25


@dataclass(frozen=True, slots=True)
class Resources:
    """What a process used during the load, warm-up included."""

    cpu_share: float | None
    """Processor time over time and the cores the process may use: 0..1."""
    rss_peak_bytes: int | None
    """Most resident memory, looked at four times a second."""
    scope: str
    """Whose: "this process", "server pid N" or "unknown"."""

    def to_json(self) -> dict[str, Any]:
        """Return all fields."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Resources:
        """Read what `to_json` gave."""
        return cls(**data)

    def __str__(self) -> str:
        if self.cpu_share is None or self.rss_peak_bytes is None:
            return "unknown; --server-pid N watches a server on this machine" if self.scope == "unknown" else "unknown"
        return f"{self.cpu_share:.0%} of the cores, at most {self.rss_peak_bytes / 2**20:,.0f} MiB ({self.scope})"


class ResourceMeter:
    """Watches one process, or none, from `start` to `stop`."""

    def __init__(self, pid: int | None, scope: str, proc: Path = Path("/proc")) -> None:
        self._scope = scope
        self._pid = pid
        self._folder = None if pid is None else proc / str(pid)
        self._rss_peak_bytes: int | None = None
        self._start_cpu_s: float | None = None
        self._start_s = 0.0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="resource-meter", daemon=True)

    @classmethod
    def of_this_process(cls) -> ResourceMeter:
        """Watch the engine in process; the load generator is in it too."""
        return cls(os.getpid(), "this process")

    @classmethod
    def of_server(cls, pid: int | None, proc: Path = Path("/proc")) -> ResourceMeter:
        """Watch a server on this machine; None: one nobody can look into. Raises ConfigError without the process."""
        if pid is None:
            return cls(None, "unknown")
        if not (proc / str(pid) / "stat").is_file():
            raise ConfigError("options", [Fault("--server-pid", f"there is no process {pid} on this machine")])
        return cls(pid, f"server pid {pid}", proc)

    def start(self) -> None:
        """Begin."""
        self._start_s = time.monotonic()
        self._start_cpu_s = self._cpu_s()
        if self._start_cpu_s is not None:
            self._thread.start()

    def stop(self) -> Resources:
        """End, and say what was used. What was there at the start and is gone now is unknown."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()
        end_cpu_s, wall_s, cores = self._cpu_s(), time.monotonic() - self._start_s, self._cores()
        if end_cpu_s is None or self._start_cpu_s is None or cores is None or wall_s <= 0:
            return Resources(None, None, self._scope)
        share = (end_cpu_s - self._start_cpu_s) / wall_s / cores
        return Resources(share, self._rss_peak_bytes, self._scope)

    def _watch(self) -> None:
        while True:
            rss_bytes = self._rss_bytes()
            if rss_bytes is not None:
                self._rss_peak_bytes = max(rss_bytes, self._rss_peak_bytes or 0)
            if self._stopped.wait(PERIOD_S):
                return

    def _cpu_s(self) -> float | None:
        """User and system time of all threads."""
        text = self._read("stat")
        if text is None:
            return None
        fields = text.rpartition(")")[2].split()  # the name before may hold spaces and parentheses
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _cores(self) -> int | None:
        """Return the cores that the process may use, which need not be those of this one."""
        try:
            return None if self._pid is None else len(os.sched_getaffinity(self._pid))
        except OSError:
            return None

    def _rss_bytes(self) -> int | None:
        text = self._read("statm")
        return None if text is None else int(text.split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def _read(self, name: str) -> str | None:
        """Return a file of the process; None once there is none."""
        if self._folder is None:
            return None
        try:
            return (self._folder / name).read_text()
        except (FileNotFoundError, ProcessLookupError):
            return None
