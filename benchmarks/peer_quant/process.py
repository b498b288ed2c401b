"""Commands in processes of their own, with wall time and peak memory as the system accounts them."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


class CommandError(Exception):
    """A command failed; the message ends with what it last said."""


@dataclass(frozen=True)
class Run:
    """A command that ended well."""

    seconds: float
    peak_bytes: int
    """Largest resident set of the process, mapped files included."""


def run_measured(
    command: Sequence[str], log: Path, *, env: Mapping[str, str] | None = None, folder: Path | None = None
) -> Run:
    """Run `command` to its end, in `folder` if given, its output in `log`. Raises CommandError if it fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **(env or {})}, cwd=folder
        )
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except KeyboardInterrupt:
            process.kill()
            process.wait()
            raise
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - start
    if process.returncode:
        last = log.read_text("utf-8", "replace")[-600:]
        raise CommandError(f"{' '.join(command[:4])} … ended with {process.returncode}; {log} ends with:\n{last}")
    return Run(seconds, usage.ru_maxrss * 1024)
