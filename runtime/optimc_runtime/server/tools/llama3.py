"""`{"name": ..., "parameters": {...}}`, behind `<|python_tag|>` or nothing, as Llama 3 writes it: one call only."""

from __future__ import annotations

from optimc_runtime.server.tools.format import ToolFormat, openai_id
from optimc_runtime.server.tools.parser import CallSyntax

LLAMA3 = ToolFormat(
    name="llama3",
    syntax=CallSyntax(opening="<|python_tag|>", filler=";", may_open_bare=True),
    new_id=openai_id,
    arguments_key="parameters",
    rule=lambda _marker, _parallel: "call",
)
