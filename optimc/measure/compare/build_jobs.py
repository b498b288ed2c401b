"""Builds side by side, where memory allows: which goes when is decided here, how one runs is `child_build`.

A build begins when there is room for one more, its need fits beside those that run, and no build that fills the cache
for it is under way: of recipes that begin alike, the first goes ahead, and the others find its passes done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from optimc.errors import MeasureError
from optimc.measure.machine import available_bytes
from optimc.progress import Progress, no_progress

MEMORY_SHARE = 0.8
"""Of the memory that is free, what builds may take together; their needs are estimates."""


@dataclass(frozen=True, slots=True)
class BuildJob:
    """One recipe to be built."""

    name: str
    recipe: Path
    output: Path
    need_bytes: int
    """Memory it is expected to take."""
    shares: str
    """Equal for recipes whose first pass on the same model is the same; the cache serves all but the first."""


class RunningBuild(Protocol):
    """A build that has begun."""

    def poll(self) -> int | None:
        """Return its exit status, None while it runs."""
        ...

    def news(self) -> Sequence[tuple[int, int, str]]:
        """Return what it has done since the last call: (done, total, label)."""
        ...

    def last_words(self) -> str:
        """Return what it said at the end, for an error message."""
        ...

    def stop(self) -> None:
        """End it and wait until it has ended; nothing happens to one that has."""
        ...


def run_builds(
    jobs: Sequence[BuildJob],
    *,
    most: int,
    memory_bytes: int,
    start: Callable[[BuildJob], RunningBuild],
    pause: Callable[[], None],
    progress: Progress = no_progress,
) -> dict[BuildJob, str]:
    """Run all builds, at most `most` at once and never needing more than `memory_bytes` together.

    A build that needs more than that alone runs alone: needs are estimates, and the build has checks of its own.
    Returns those that failed, each with the reason in one line; the others go on. On any error here all are ended.
    """
    waiting = list(jobs)
    running: dict[BuildJob, RunningBuild] = {}
    finished: set[str] = set()
    failed: dict[BuildJob, str] = {}
    try:
        while waiting or running:
            for job in [job for job in waiting if _may_start(job, running, finished, most, memory_bytes)]:
                # Asked again: the one before it may have taken the room.
                if _may_start(job, running, finished, most, memory_bytes):
                    waiting.remove(job)
                    running[job] = start(job)
            pause()
            for job, build in list(running.items()):
                for done, total, label in build.news():
                    progress(done, total, f"{job.name}: {label}")
                status = build.poll()
                if status is None:
                    continue
                del running[job]
                if status == 0:
                    finished.add(job.shares)
                else:
                    failed[job] = _failed(job, status, build.last_words())
                build.stop()
    finally:
        for build in running.values():
            build.stop()
    return failed


def _may_start(
    job: BuildJob, running: dict[BuildJob, RunningBuild], finished: set[str], most: int, memory_bytes: int
) -> bool:
    if len(running) >= most:
        return False
    if job.shares not in finished and any(other.shares == job.shares for other in running):
        return False
    return not running or job.need_bytes + sum(other.need_bytes for other in running) <= memory_bytes


def _failed(job: BuildJob, status: int, last_words: str) -> str:
    how = f"was ended by signal {-status}" if status < 0 else f"failed with status {status}"
    return f"building {job.recipe} {how}: {' '.join(last_words.split()) or 'it said nothing'}"


def estimated_need(earlier_peaks: Sequence[int], checkpoint_bytes: int) -> int:
    """Return the memory a build will take: what the heaviest pass of an earlier build of the recipe took, else three
    times the checkpoint (as stored, in float32, and the pass's own) and 1 GiB for the libraries."""
    return max(earlier_peaks, default=0) or 3 * checkpoint_bytes + (1 << 30)


def memory_for_builds(
    max_host_bytes: int | None, most: int, available: Callable[[], int | None] = available_bytes
) -> int:
    """Return what at most `most` builds at once may take together: what the user allows, or a share of what is free.

    Raises MeasureError where neither is known; a build that runs alone needs no answer.
    """
    if max_host_bytes is not None:
        return max_host_bytes
    if most == 1:
        return 0
    free = available()
    if free is None:
        raise MeasureError(
            f"this machine does not say how much memory is free for {most} builds at once; give --max-host-bytes, or "
            "--build-jobs 1"
        )
    return int(MEMORY_SHARE * free)
