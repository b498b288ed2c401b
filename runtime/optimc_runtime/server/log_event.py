"""Log messages that are data."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_PLAIN = re.compile(r"[A-Za-z0-9_./:,+-]+")


@dataclass(frozen=True, slots=True)
class LogEvent:
    """A message to log: as text `event key=value ..` on one line; a JSON formatter takes the fields as keys."""

    event: str
    fields: Mapping[str, Any]

    def __str__(self) -> str:
        return " ".join([self.event, *(f"{name}={_word(value)}" for name, value in self.fields.items())])


def _word(value: Any) -> str:
    """Return a value without spaces around it or line breaks in it, whoever chose it."""
    word = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    return word if _PLAIN.fullmatch(word) else json.dumps(word)
