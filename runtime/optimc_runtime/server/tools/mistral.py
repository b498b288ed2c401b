"""`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, as Mistral's models up to tokenizer v7 write it."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable

from optimc_runtime.server.tools.format import ToolFormat
from optimc_runtime.server.tools.parser import CallSyntax

_SYNTAX = CallSyntax(opening="[TOOL_CALLS]", filler="[,]")


def _rule(marker: Callable[[str], str], parallel: bool) -> str:
    calls = 'call (", " call)*' if parallel else "call"
    return f'{marker(_SYNTAX.opening)} " "? "[" {calls} "]"'


def _new_id() -> str:
    """Nine letters and digits: the template takes no other ids."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


MISTRAL = ToolFormat(name="mistral", syntax=_SYNTAX, new_id=_new_id, arguments_key="arguments", rule=_rule)
