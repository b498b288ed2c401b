"""`<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>`, as Hermes, Qwen 2.5 and Qwen 3 write it."""

from __future__ import annotations

from collections.abc import Callable

from optimc_runtime.server.tools.format import ToolFormat, openai_id
from optimc_runtime.server.tools.parser import CallSyntax

_SYNTAX = CallSyntax(opening="<tool_call>", closing="</tool_call>")


def _rule(marker: Callable[[str], str], parallel: bool) -> str:
    one = f'{marker(_SYNTAX.opening)} "\\n" call "\\n" {marker(_SYNTAX.closing)}'
    return f'{one} ("\\n" {one})*' if parallel else one


HERMES = ToolFormat(
    name="hermes",
    syntax=_SYNTAX,
    new_id=openai_id,
    arguments_key="arguments",
    rule=_rule,
)
