"""The machine a figure was measured on: enough to read the figure, and a stable id to file it under."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

# What is free at a moment is no part of a Machine, but asked of it: one truth, the one the runtime sizes its pool by.
from optimc_runtime.executor.available_memory import available_bytes as available_bytes

ISA_FLAGS = (
    "avx2",
    "fma",
    "avx_vnni",
    "avx512f",
    "avx512bw",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_int8",
    "amx_bf16",
    "asimd",
    "asimddp",
    "i8mm",
    "sve",
    "bf16",
)
"""CPU features that decide which kernels run, by the names of /proc/cpuinfo (x86, then Arm)."""

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class Machine:
    """What determines speed and can be read without measuring."""

    cpu: str
    cores: int
    """Logical cores this process may use."""
    cpu_quota: float | None
    """Cores' worth of time the control group allows; None without a limit."""
    threads: str
    """Thread limits in the environment, "" if there are none."""
    isa: tuple[str, ...]
    memory_bytes: int
    platform: str

    @property
    def id(self) -> str:
        """Sixteen hex digits, equal for equal machines under equal limits."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        parts = [self.cpu, f"{self.cores} cores"]
        if self.cpu_quota is not None:
            parts.append(f"limited to {self.cpu_quota:g} cores' time")
        if self.threads:
            parts.append(self.threads)
        parts += [" ".join(self.isa) or "no known vector extension", f"{self.memory_bytes / 2**30:.0f} GiB"]
        return " · ".join([*parts, self.platform])

    def to_json(self) -> dict[str, object]:
        """Return all fields and the id."""
        return {**asdict(self), "isa": list(self.isa), "id": self.id}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Machine:
        """Inverse of `to_json`. Raises KeyError or TypeError on anything else."""
        taken = {field.name: data[field.name] for field in fields(cls)}
        return cls(**{**taken, "isa": tuple(taken["isa"])})


def read_machine(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> Machine:
    """Describe this machine. `root` is where proc/ and sys/ hang; what is not there is left out, not guessed."""
    cpuinfo = _read(root / "proc/cpuinfo")
    flags = set(_field(cpuinfo, "flags", "Features").split())
    threads = [f"{name}={environment[name]}" for name in THREAD_VARIABLES if environment.get(name)]
    return Machine(
        cpu=_field(cpuinfo, "model name", "CPU part") or platform.processor() or "unknown CPU",
        cores=_usable_cores(),
        cpu_quota=_quota(_read(root / "sys/fs/cgroup/cpu.max")),
        threads=" ".join(threads),
        isa=tuple(flag for flag in ISA_FLAGS if flag in flags),
        memory_bytes=_memory_bytes(_read(root / "proc/meminfo")),
        platform=f"{platform.system()} {platform.machine()}",
    )


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.is_file() else ""


def _field(cpuinfo: str, *names: str) -> str:
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in names:
            return value.strip()
    return ""


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _quota(cpu_max: str) -> float | None:
    """Parse the control group's "quota period" in microseconds; "max" means no limit."""
    fields = cpu_max.split()
    return None if len(fields) != 2 or fields[0] == "max" else int(fields[0]) / int(fields[1])


def _memory_bytes(meminfo: str) -> int:
    """Parse MemTotal, rounded to 2**28 bytes: kernels reserve a little more or less at each start."""
    kib = _field(meminfo, "MemTotal").split()
    return round(int(kib[0]) * 1024 / 2**28) * 2**28 if kib else 0
