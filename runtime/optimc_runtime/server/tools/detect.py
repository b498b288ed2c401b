"""Which format a chat template asks its model to call tools in."""

from __future__ import annotations

from optimc_runtime.server.tools.format import ToolFormat

_FORMATS: tuple[tuple[str, ToolFormat], ...] = ()


def format_of(template_source: str) -> ToolFormat | None:
    """Return the format, by the marker the template itself writes; None if it is none we know."""
    for marker, tool_format in _FORMATS:
        if marker in template_source:
            return tool_format
    return None
