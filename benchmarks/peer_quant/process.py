"""Commands in processes of their own, with wall time and peak memory as the system accounts them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
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


_LAUNCHER = """
import os, subprocess, sys
process = subprocess.Popen(sys.argv[2:])
_, status, usage = os.wait4(process.pid, 0)
with os.fdopen(int(sys.argv[1]), "w") as pipe:
    pipe.write(f"{os.waitstatus_to_exitcode(status)} {usage.ru_maxrss}")
"""
"""A process begins with the largest resident set of the one that starts it, since the kernel counts the memory it had
before it became another program. So a small one starts it, not the benchmark, which may have held a model."""


def run_measured(
    command: Sequence[str], log: Path, *, env: Mapping[str, str] | None = None, folder: Path | None = None
) -> Run:
    """Run `command` to its end, in `folder` if given, its output in `log`. Raises CommandError if it fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    read_end, write_end = os.pipe()
    start = time.perf_counter()
    with os.fdopen(read_end) as pipe, log.open("wb") as output:
        launcher = subprocess.Popen(
            [sys.executable, "-S", "-c", _LAUNCHER, str(write_end), *command],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
            cwd=folder,
            pass_fds=(write_end,),
            start_new_session=True,
        )
        os.close(write_end)
        try:
            launcher.wait()
        except KeyboardInterrupt:
            os.killpg(launcher.pid, signal.SIGKILL)
            launcher.wait()
            raise
        seconds = time.perf_counter() - start
        told = pipe.read().split()
    code, peak = (int(told[0]), int(told[1])) if told else (launcher.returncode, 0)
    if code:
        last = log.read_text("utf-8", "replace")[-600:]
        raise CommandError(f"{' '.join(command[:4])} … ended with {code}; {log} ends with:\n{last}")
    return Run(seconds, peak * 1024)
