"""Messages and tools that are no messages and tools of the API, which the reader of traffic passes on as they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from optimc.errors import ConfigError, Fault
from optimc.measure.load.traffic import MAX_FAULTS, TrafficLine


def check_shapes(lines: Iterable[TrafficLine]) -> None:
    """Raise ConfigError that names each line which cannot be rendered, at most 20."""
    faults: list[Fault] = []
    for line in lines:
        why = _fault(line)
        if why is not None:
            faults.append(Fault(f"line {line.number}", why))
            if len(faults) == MAX_FAULTS:
                break
    if faults:
        raise ConfigError("traffic", faults)


def _fault(line: TrafficLine) -> str | None:
    for index, message in enumerate(line.messages):
        content, calls = message.get("content"), message.get("tool_calls")
        if not (content is None or isinstance(content, str) or _are_objects(content)):
            return f"messages[{index}].content must be a string or a list of parts"
        if not isinstance(content, str) and any(not isinstance(part.get("text", ""), str) for part in content or ()):
            return f"messages[{index}].content: a part's text must be a string"
        if not (calls is None or _are_objects(calls)) or not all(_has_function(call) for call in calls or ()):
            return f"messages[{index}].tool_calls must be a list of objects, each with a function"
    for index, tool in enumerate(line.tools):
        if not _has_function(tool):
            return f"tools[{index}].function must be an object"
    return None


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _has_function(value: Mapping[str, Any]) -> bool:
    return isinstance(value.get("function", {}), dict)
