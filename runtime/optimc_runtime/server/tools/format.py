"""How one family of models writes tool calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from optimc_runtime.server.tools.parser import ToolParser

TokenId = Callable[[str], int | None]
"""The id of a token by its exact spelling, None if it is none."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One format. `parser` makes a parser for one answer."""

    name: str
    parser: Callable[[], ToolParser]
    grammar: Callable[[Sequence[dict[str, Any]], TokenId, bool], str]
    """(functions, token_id, parallel) to the Lark grammar of an answer that is calls of these functions and nothing
    else, one or, if parallel, more."""
