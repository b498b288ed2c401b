"""Which format a chat template asks its model to call tools in."""

from __future__ import annotations

from optimc_runtime.server.tools.format import ToolFormat
from optimc_runtime.server.tools.hermes import HERMES
from optimc_runtime.server.tools.llama3 import LLAMA3
from optimc_runtime.server.tools.mistral import MISTRAL

FORMATS = (HERMES, MISTRAL, LLAMA3)


def format_of(template_source: str) -> ToolFormat | None:
    """Return the format, by the marker the template itself writes; None if it is none we know."""
    if "<function=" in template_source or "[ARGS]" in template_source:
        return None  # the same markers, with something else than JSON objects behind them
    if HERMES.syntax.opening in template_source:
        return HERMES
    if MISTRAL.syntax.opening in template_source:
        return MISTRAL
    if LLAMA3.syntax.opening in template_source or '"parameters": ' in template_source:
        return LLAMA3
    return None
