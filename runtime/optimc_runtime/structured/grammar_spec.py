"""What an answer must look like, as the client said it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GrammarKind = Literal["json_object", "json_schema", "regex", "lark"]

ONE_SPELLING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The `x-guidance` of every schema. JSON is spelled as models write it anyway: one that is free to could write spaces
for ever."""


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A grammar before it is compiled; equal ones are compiled once."""

    kind: GrammarKind
    text: str
    """The schema as JSON, the regex, or the Lark grammar; "" for json_object."""
    param: str
    """The request field to blame: "response_format", "guided_regex", "grammar" or "tools"."""
