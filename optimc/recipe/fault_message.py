"""What a checked configuration's fault says, in our words instead of pydantic's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def fault_message(detail: Any, fields: Iterable[str]) -> str:
    """Return the message for one of `ValidationError.errors()`; `fields` are the keys of the checked model."""
    kind, message = detail["type"], detail["msg"]
    if kind == "extra_forbidden":
        # The keys of a nested section are not those of the model.
        known = f"; known: {', '.join(sorted(fields)) or 'none'}" if len(detail["loc"]) == 1 else ""
        return f"unknown key{known}"
    if kind == "missing":
        return "is required"
    if kind == "model_type":
        return f"must be a mapping of keys to values, got {detail['input']!r}"
    if kind == "value_error":
        return str(detail["ctx"]["error"])
    if isinstance(detail["input"], (dict, list)):
        return str(message)
    return f"{message[:1].lower()}{message[1:]}, got {detail['input']!r}"
