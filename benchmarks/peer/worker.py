"""An engine in a process of its own: one JSON object per line in, one out.

Each side thus has its own threads and allocator, and between its turns nothing of it runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

BENCHMARKS = Path(__file__).parents[1]
"""Where workers run, so that `-m peer.NAME` finds them."""


class PeerError(Exception):
    """An engine could not be started or gave no answer; the message ends with what it last said."""


class Worker:
    """Starts `command` and talks to it until closed. Usable as a context manager."""

    def __init__(self, command: Sequence[str]) -> None:
        self._name = " ".join(command)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._process = subprocess.Popen(
            command, cwd=BENCHMARKS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, **question: Any) -> dict[str, Any]:
        """Send a question, wait for the answer. Raises PeerError."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(json.dumps(question), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise self._failure() from None
        line = self._process.stdout.readline()
        if not line:
            raise self._failure()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _failure(self) -> PeerError:
        self._process.wait(20)
        self._log.seek(0)
        said = self._log.read().decode(errors="replace").strip()[-2000:]
        return PeerError(f"{self._name}: ended with {self._process.returncode}\n{said}")


def answer_questions(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """The other side: answer each line of standard input until it ends. Whatever libraries print goes to standard
    error, so that only answers arrive."""
    with os.fdopen(os.dup(1), "w") as replies:
        os.dup2(2, 1)
        for line in sys.stdin:
            print(json.dumps(answer(json.loads(line))), file=replies, flush=True)
