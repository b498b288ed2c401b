"""`optimc build` as a process of its own, which ends when whoever started it does.

Run as a module it is that process: it builds, and ends as soon as its standard input does, which the system closes
when the parent dies, however that happens.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from optimc.measure.compare.build_jobs import BuildJob

_TERMINATE_S = 10.0
"""A build that does not end by then is killed."""


class ChildBuild:
    """A RunningBuild."""

    def __init__(self, job: BuildJob, arguments: Sequence[str]) -> None:
        """Start `optimc build RECIPE -o OUTPUT` with further `arguments`."""
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as the process
        self._position = 0
        self._begun: str | None = None
        command = [sys.executable, "-m", __spec__.name, "build", str(job.recipe), "-o", str(job.output), *arguments]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=self._said, cwd=Path.cwd()
        )

    def poll(self) -> int | None:
        """Return its exit status, None while it runs."""
        return self._process.poll()

    def news(self) -> list[tuple[int, int, str]]:
        """Return steps that began and ended; the child writes a line for each, "rtn ..."."""
        *lines, rest = (said := self._read(self._position)).split(b"\n")
        self._position += len(said) - len(rest)
        found: list[tuple[int, int, str]] = []
        for line in lines:
            text = line.decode(errors="replace")
            if text.endswith(" ..."):
                found += self._ended()
                self._begun = text.removesuffix(" ...")
                found.append((0, 1, self._begun))
        if self.poll() is not None:
            found += self._ended()
        return found

    def _read(self, position: int) -> bytes:
        # Without seeking: the child writes where this descriptor stands, for both share its place in the file.
        descriptor = self._said.fileno()
        return os.pread(descriptor, os.fstat(descriptor).st_size - position, position)

    def _ended(self) -> list[tuple[int, int, str]]:
        begun, self._begun = self._begun, None
        return [] if begun is None else [(1, 1, begun)]

    def last_words(self) -> str:
        """Return the end of what it wrote, without the lines of progress."""
        lines = self._read(0).decode(errors="replace").splitlines()
        told = [line for line in lines if line.strip() and not line.endswith(" ...") and ": done in " not in line]
        return "\n".join(told[-12:]).removeprefix("error: ")

    def stop(self) -> None:
        """End it and wait until it has ended."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_TERMINATE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._said.close()


def _end_with_parent() -> None:
    # The descriptor itself: a thread that waits inside sys.stdin would keep the interpreter from ending.
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    runpy.run_module("optimc", run_name="__main__", alter_sys=True)
