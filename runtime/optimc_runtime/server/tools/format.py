"""How a family of models writes tool calls, and what can be said of a call in every format."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optimc_runtime.server.client import TextTokenizer
from optimc_runtime.server.tools.parser import CallSyntax, ToolParser
from optimc_runtime.structured.grammar_spec import ONE_SPELLING

Function = Mapping[str, Any]
"""A function as the client describes it: name, description, parameters."""

NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def openai_id() -> str:
    """Return a new call id that looks as the API's own do."""
    return f"call_{uuid.uuid4().hex[:24]}"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One format. Its grammar is that of an answer that is calls and nothing else."""

    name: str
    syntax: CallSyntax
    new_id: Callable[[], str]
    """Makes the id of a call."""
    arguments_key: str
    rule: Callable[[Callable[[str], str], bool], str]
    """(marker to Lark, parallel) to the rule `start`, over the rule `call`: one call or, if parallel, more."""

    def grammar(self, functions: Sequence[Function], tokenizer: TextTokenizer, *, parallel: bool) -> str:
        """Return, in Lark, the grammar of an answer that calls some of `functions`."""
        lines = [f"start: {self.rule(lambda marker: _marker(marker, tokenizer), parallel)}"]
        lines.append("call: " + " | ".join(f"call_{index}" for index in range(len(functions))))
        for index, function in enumerate(functions):
            head = json.dumps(f'{{"name": "{function["name"]}", "{self.arguments_key}": ')
            schema = {"type": "object", **(function.get("parameters") or NO_PARAMETERS), "x-guidance": ONE_SPELLING}
            lines.append(f'call_{index}: {head} arguments_{index} "}}"')
            # A description's & is text; of those that join expressions a grammar takes few.
            text = json.dumps(schema).replace("&", "\\u0026")
            lines.append(f"arguments_{index}: %json {text}")
        return "\n".join(lines)

    def parser(self, names: Collection[str]) -> ToolParser:
        """Return a parser for one answer, in which functions of these names are called."""
        return ToolParser(self.syntax, frozenset(names), self.new_id)

    def needs_special_tokens(self, tokenizer: TextTokenizer) -> bool:
        """Whether a marker is a special token, which the answer's text must then show."""
        return any(tokenizer.token_id(marker) in tokenizer.special_ids for marker in self.syntax.markers)


def _marker(text: str, tokenizer: TextTokenizer) -> str:
    """Return a marker in Lark: special tokens are named by id, for they have no text in a grammar."""
    token_id = tokenizer.token_id(text)
    return f"<[{token_id}]>" if token_id is not None and token_id in tokenizer.special_ids else json.dumps(text)
