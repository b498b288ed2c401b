"""What was asked, with its text, one line of JSON per prompt: to be replayed, and looked through for lost prefixes.

Only on request, since it holds prompts: the file can be read by its owner alone, and nothing in it ever goes to
another log. The event loop hands over and goes on; a thread words and writes. If that cannot keep up, lines are dropped
and counted, never waited for.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

from optimc.errors import ConfigError, Fault
from optimc_runtime.server.protocol.chat import Message
from optimc_runtime.server.protocol.tools import Tool
from optimc_runtime.server.request_record import RequestRecord

logger = logging.getLogger(__name__)

FORMAT = 1
MAX_WAITING = 1024
"""Lines that may wait for the disk."""
MAX_WAITING_TOKENS = 4_000_000
"""Prompt tokens that may: lines differ a thousandfold in length."""
CLOSE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Asked:
    """What an accepted request asked for, as its client sent it."""

    endpoint: Literal["chat", "completions"]
    prompt_ids: Sequence[Sequence[int]]
    """Of each prompt, as the model reads it."""
    max_tokens: int | None
    messages: Sequence[Message] = ()
    tools: Sequence[Tool] = ()
    """Those the model sees."""
    prompts: Sequence[str | Sequence[int]] = ()


@dataclass(frozen=True, slots=True)
class _Entry:
    """One line to be. Only figures are taken on the event loop; texts are worded by the writer."""

    asked: Asked
    index: int
    """Of its prompt."""
    figures: dict[str, Any]

    @property
    def tokens(self) -> int:
        return len(self.asked.prompt_ids[self.index])


class TrafficLog:
    """Writes requests to a file made for it. Raises ConfigError if the file is there already or cannot be made.

    `ids` adds the token ids of every prompt. Times count from here on.
    """

    def __init__(self, path: Path, *, ids: bool = False) -> None:
        self._file = _create(path)
        self._path = path
        self._ids = ids
        self._started_s = time.monotonic()
        self._waiting: queue.SimpleQueue[_Entry | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_waiting = 0
        self._tokens_waiting = 0
        self._failed = False
        self.num_written = 0
        self.num_dropped = 0
        self._writer = threading.Thread(target=self._write_all, name="traffic-log", daemon=True)
        self._writer.start()

    def record(self, record: RequestRecord) -> None:
        """Take in a request that has ended, one line per prompt; one that was never accepted leaves none."""
        asked = record.asked
        if asked is None or not record.is_accepted:
            return
        common: dict[str, Any] = {
            "format": FORMAT,
            "at_s": round(record.arrived_s - self._started_s, 6),
            "request_id": record.request_id,
            **({"tenant": record.tenant} if record.tenant else {}),
            "endpoint": asked.endpoint,
        }
        for index in range(len(asked.prompt_ids)):
            self._put(_Entry(asked, index, {**common, **record.prompt_figures(index)}))

    def close(self) -> None:
        """Write what waits, for ten seconds at most, and close the file. Nothing may be recorded afterwards."""
        self._waiting.put(None)
        self._writer.join(CLOSE_TIMEOUT_S)
        if self._writer.is_alive():
            logger.warning("traffic log %s: the disk does not answer; what still waits is lost", self._path)
        logger.info("traffic log %s: %d lines written, %d dropped", self._path, self.num_written, self.num_dropped)

    def _put(self, entry: _Entry) -> None:
        with self._lock:
            is_full = self._num_waiting >= MAX_WAITING or self._tokens_waiting + entry.tokens > MAX_WAITING_TOKENS
            if not (is_full or self._failed):
                self._num_waiting += 1
                self._tokens_waiting += entry.tokens
        if is_full or self._failed:
            self._drop()
        else:
            self._waiting.put(entry)

    def _drop(self) -> None:
        with self._lock:
            self.num_dropped += 1
            dropped = self.num_dropped
        if dropped & (dropped - 1) == 0:  # 1, 2, 4, 8 ...: said early, and not for each
            logger.warning(
                "traffic log %s: %d lines dropped so far, since the disk does not keep up or failed",
                self._path,
                dropped,
            )

    def _write_all(self) -> None:
        with self._file:
            while (entry := self._waiting.get()) is not None:
                self._write(entry)
                with self._lock:
                    self._num_waiting -= 1
                    self._tokens_waiting -= entry.tokens

    def _write(self, entry: _Entry) -> None:
        if self._failed:
            self._drop()
            return
        try:
            self._file.write(json.dumps(self._line(entry), ensure_ascii=False, separators=(",", ":")) + "\n")
            if self._waiting.empty():
                self._file.flush()
            self.num_written += 1
        except OSError as error:  # a full disk must not end the server, and half a line helps nobody
            self._failed = True
            logger.error("traffic log %s: %s; nothing more is written", self._path, error.strerror or error)
            self._drop()

    def _line(self, entry: _Entry) -> dict[str, Any]:
        asked = entry.asked
        line = dict(entry.figures)
        if asked.endpoint == "chat":
            line["messages"] = [message.model_dump(exclude_defaults=True) for message in asked.messages]
            if asked.tools:
                line["tools"] = [tool.model_dump(exclude_defaults=True) for tool in asked.tools]
        else:
            line["prompt"] = asked.prompts[entry.index]
        if self._ids:
            line["prompt_ids"] = list(asked.prompt_ids[entry.index])
        line["prompt_tokens"] = entry.tokens
        if asked.max_tokens is not None:
            line["max_tokens"] = asked.max_tokens
        return line


def check_new_file(path: Path) -> None:
    """Raise ConfigError if a TrafficLog could not be made there: worth knowing before a model is loaded for it."""
    if path.exists():
        raise _exists(path)
    if not os.access(path.parent, os.W_OK | os.X_OK):
        fault = Fault("--log-traffic", f"{path}: there is no folder {path.parent} that can be written to")
        raise ConfigError("options", [fault])


def _exists(path: Path) -> ConfigError:
    message = f"{path} is there already; choose another name, for times in it count from one start"
    return ConfigError("options", [Fault("--log-traffic", message)])


def _create(path: Path) -> TextIO:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise _exists(path) from None
    except OSError as error:
        raise ConfigError("options", [Fault("--log-traffic", f"{path}: {error.strerror or error}")]) from error
    # A lone surrogate is refused with 400 before a request is accepted, but a message nobody renders may hold one.
    return os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace", newline="\n")
