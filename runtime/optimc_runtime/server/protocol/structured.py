"""Fields that say what an answer must look like."""

from __future__ import annotations

import json
from typing import Any, ClassVar, Literal

from pydantic import Field

from optimc.errors import RequestError
from optimc_runtime.server.protocol.parse import Body
from optimc_runtime.structured.grammar_spec import GrammarSpec


class JsonSchema(Body):
    """A schema by name, as `response_format` holds it."""

    without_effect: ClassVar[frozenset[str]] = frozenset({"description"})

    name: str = Field(min_length=1, max_length=64)
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool = False
    """Every schema is kept to, whatever this says."""


class ResponseFormat(Body):
    """The `response_format` object."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredFields(Body):
    """Ways to say it, of which a request takes one."""

    response_format: ResponseFormat | None = None
    """JSON of any shape ("json_object"), or of the shape that `json_schema.schema` describes."""
    guided_regex: str | None = None
    """A regular expression that the whole answer matches."""
    grammar: str | None = None
    """A context-free grammar in llguidance's Lark dialect, from the rule `start`."""

    def grammar_spec(self) -> GrammarSpec | None:
        """Return what the answer must look like, None if it is free. Raises RequestError if it is said in two ways."""
        specs = [spec for spec in (self._format_spec(), self._regex_spec(), self._lark_spec()) if spec is not None]
        if len(specs) > 1:
            names = " and ".join(spec.param for spec in specs)
            raise RequestError(f"{names} exclude each other; send one", param=specs[1].param)
        return specs[0] if specs else None

    def _format_spec(self) -> GrammarSpec | None:
        wanted = self.response_format
        if wanted is None:
            return None
        if wanted.json_schema is not None and wanted.type != "json_schema":
            raise RequestError(
                f"json_schema is for type json_schema; type {wanted.type} would ignore it", param="response_format"
            )
        if wanted.type == "text":
            return None
        if wanted.type == "json_object":
            return GrammarSpec("json_object", "", "response_format")
        if wanted.json_schema is None or wanted.json_schema.schema_ is None:
            raise RequestError("type json_schema needs json_schema.schema", param="response_format")
        return GrammarSpec("json_schema", schema_text(wanted.json_schema.schema_, "response_format"), "response_format")

    def _regex_spec(self) -> GrammarSpec | None:
        return None if self.guided_regex is None else GrammarSpec("regex", self.guided_regex, "guided_regex")

    def _lark_spec(self) -> GrammarSpec | None:
        return None if self.grammar is None else GrammarSpec("lark", self.grammar, "grammar")


def schema_text(schema: dict[str, Any], param: str) -> str:
    """Return a schema as JSON. Raises RequestError if it is nested too deeply to be written."""
    try:
        return json.dumps(schema, ensure_ascii=True)
    except RecursionError:
        raise RequestError(f"{param}: the schema is nested too deeply", param=param) from None
