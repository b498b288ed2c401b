"""How log lines look: words for a terminal, JSON for whatever gathers logs."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from optimc.errors import ConfigError, Fault

FORMATS = ("json", "text")


class JsonFormatter(logging.Formatter):
    """One JSON object a line. A message that is data (with `event` and `fields`) becomes keys, any other `message`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {"time": time, "level": record.levelname.lower(), "logger": record.name}
        fields = getattr(record.msg, "fields", None)
        if isinstance(fields, Mapping):
            line |= {"event": getattr(record.msg, "event", None), **fields}
        else:
            line["message"] = record.getMessage()
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def use_log_format(wanted: str | None) -> None:
    """Write all log lines of this process as `wanted` says: json or text; None: text on a terminal, else JSON.

    Raises ConfigError for any other word.
    """
    if wanted not in (None, *FORMATS):
        raise ConfigError("options", [Fault("--log-format", f"must be json or text, got {wanted!r}")])
    if wanted == "text" or (wanted is None and sys.stderr.isatty()):
        return
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stderr:
            handler.setFormatter(JsonFormatter())
