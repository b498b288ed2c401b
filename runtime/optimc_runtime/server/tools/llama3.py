"""`{"name": ..., "parameters": {...}}`, behind `<|python_tag|>` or nothing, as Llama 3 writes it: one call only."""

from __future__ import annotations

import uuid

from optimc_runtime.server.tools.format import ToolFormat
from optimc_runtime.server.tools.parser import CallSyntax

LLAMA3 = ToolFormat(
    name="llama3",
    syntax=CallSyntax(opening="<|python_tag|>", filler=";", may_open_bare=True),
    new_id=lambda: f"call_{uuid.uuid4().hex[:24]}",
    arguments_key="parameters",
    rule=lambda _marker, _parallel: "call",
)
