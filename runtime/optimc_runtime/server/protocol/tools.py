"""Tools a model may call, calls it made, and which it is to make."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field
from pydantic_core import from_json

from optimc_runtime.server.protocol.parse import Body, Unsupported

MAX_TOOLS = 128
NAME_PATTERN = r"^[A-Za-z0-9_-]{1,64}$"


def _object_schema(parameters: dict[str, Any]) -> dict[str, Any]:
    if parameters.get("type", "object") != "object":
        raise ValueError("the parameters of a function are an object: its type must be 'object'")
    return parameters


def _json_object(text: str) -> str:
    try:
        value = from_json(text, allow_inf_nan=False)  # as strict as bodies are: Python's own reader takes NaN
        json.loads(text)  # what templates are given; it has limits of its own
    except (ValueError, RecursionError):
        raise ValueError("must be JSON, as the model wrote it") from None
    if not isinstance(value, dict):
        raise ValueError("must be a JSON object")
    return text


class Function(Body):
    """A function the model may call."""

    name: str = Field(pattern=NAME_PATTERN)
    description: str | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(_object_schema)] | None = None
    """A JSON schema of the arguments; absent: there are none."""
    strict: bool = False
    """Arguments are certain to keep to the schema; needs a `tool_choice` that is sure to call."""


class Tool(Body):
    """One of `tools`."""

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """Return the tool as templates know it."""
        return {"type": "function", "function": self.function.model_dump(exclude_none=True, exclude={"strict"})}


class FunctionName(Body):
    """A function by name."""

    name: str = Field(pattern=NAME_PATTERN)


class NamedTool(Body):
    """The `tool_choice` that calls one function."""

    type: Literal["function"]
    function: FunctionName


class CalledFunction(Body):
    """What an earlier call said."""

    name: str = Field(pattern=NAME_PATTERN)
    arguments: Annotated[str, AfterValidator(_json_object)]
    """JSON of an object."""


class ToolCall(Body):
    """A call in an earlier assistant message, as the server sent it."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        "index": Unsupported("it belongs to streams only", tuple(range(MAX_TOOLS))),
    }

    id: str = Field(min_length=1, max_length=64)
    type: Literal["function"]
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """Return the call as templates know it: the arguments are an object."""
        function = {"name": self.function.name, "arguments": json.loads(self.function.arguments)}
        return {"id": self.id, "type": "function", "function": function}
