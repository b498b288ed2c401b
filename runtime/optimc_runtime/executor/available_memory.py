"""How much memory a process may still take, as the machine and its control group have it."""

from __future__ import annotations

from pathlib import Path

GROUP = Path("/sys/fs/cgroup")
"""Where a process finds its own control group, in a container at least."""


def available_bytes(meminfo: Path = Path("/proc/meminfo"), group: Path = GROUP) -> int | None:
    """Return what is free for the whole machine or for this process's control group, whichever is less.

    None where the machine does not say. A control group that cannot be read sets no limit. Cached files that nobody has
    touched for long count as free in both: the kernel gives them up first.
    """
    available = _field(_text(meminfo), "MemAvailable:")
    if available is None:
        return None
    limit, used = limit_bytes(group), _text(group / "memory.current").strip()
    if limit is None or not used.isdecimal():
        return available * 1024
    reclaimable = _field(_text(group / "memory.stat"), "inactive_file") or 0
    return min(available * 1024, max(0, limit - int(used) + reclaimable))


def limit_bytes(group: Path = GROUP) -> int | None:
    """Return what this process's control group may take in all; None without a limit."""
    limit = _text(group / "memory.max").strip()
    return int(limit) if limit.isdecimal() else None


def _field(text: str, name: str) -> int | None:
    """Return the number behind a line's name; None without the line."""
    found = next((words for words in map(str.split, text.splitlines()) if words[:1] == [name]), None)
    return None if found is None else int(found[1])


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.is_file() else ""
