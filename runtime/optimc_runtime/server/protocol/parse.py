"""From a JSON object to a request model: strict types, nulls as defaults, and no field dropped in silence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, ValidationError, ValidationInfo, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from optimc.errors import RequestError

MAX_QUOTED_CHARS = 80


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A field of the API that we know and do not implement."""

    reason: str
    neutral: tuple[object, ...] = ()
    """Values that ask for nothing beyond what we do; they are accepted."""

    def accepts(self, value: object) -> bool:
        """Return whether `value` changes nothing."""
        return any(type(value) is type(known) and value == known for known in self.neutral)


@dataclass(slots=True)
class UnknownFields:
    """What to do with fields nobody knows, and those that were met."""

    allow: bool
    met: list[str] = field(default_factory=list)


class Body(BaseModel):
    """Base of every object a client sends. Nulls count as absent; a field is known, refused by name, or unknown."""

    model_config = ConfigDict(strict=True, frozen=True, use_attribute_docstrings=True)

    unsupported: ClassVar[Mapping[str, Unsupported]] = {}
    """Fields refused unless their value is neutral."""
    without_effect: ClassVar[frozenset[str]] = frozenset()
    """Fields that never change an answer, such as the end user's name: accepted and dropped."""
    known: ClassVar[frozenset[str]] = frozenset()
    """Names of the fields as clients write them."""

    @classmethod
    def __pydantic_init_subclass__(cls, **_options: Any) -> None:
        cls.known = frozenset(info.alias or name for name, info in cls.model_fields.items())

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Describe all that is accepted: nulls, and fields that ask for nothing, included."""
        schema = handler.resolve_ref_schema(handler(core))
        required = schema.get("required", [])
        schema["properties"] = {
            **{
                name: value if name in required else _or_null(value)
                for name, value in schema.get("properties", {}).items()
            },
            **{
                name: {"enum": [*refused.neutral, None], "description": f"Not supported: {refused.reason}."}
                for name, refused in cls.unsupported.items()
                if name not in cls.known
            },
            **{name: {"description": "Accepted, and without effect."} for name in sorted(cls.without_effect)},
        }
        schema["additionalProperties"] = False
        return schema

    @model_validator(mode="before")
    @classmethod
    def _sort_fields(cls, data: Any, info: ValidationInfo) -> Any:
        if not isinstance(data, dict):
            return data
        unknown = info.context
        assert isinstance(unknown, UnknownFields), "bodies are read by parse"
        given: dict[str, Any] = {}
        for name, value in data.items():
            if value is None or name in cls.without_effect:
                continue
            if name in cls.known:
                given[name] = value
            elif name in cls.unsupported:
                refused = cls.unsupported[name]
                if not refused.accepts(value):
                    raise _fault("unsupported", f"{_quote(name)} is not supported: {refused.reason}", name)
            elif unknown.allow:
                unknown.met.append(name)
            else:
                raise _fault("unknown", f"unknown field {_quote(name)}; nothing would come of it, remove it", name)
        return given


Model = TypeVar("Model", bound=Body)


def parse(
    model: type[Model], body: Mapping[str, Any], *, allow_unknown: bool, on_unknown: Callable[[list[str]], None]
) -> Model:
    """Return `body` as a `model`. Raises RequestError for the first fault, with the path of its field in `param`.

    With `allow_unknown`, unknown fields are handed to `on_unknown` instead.
    """
    unknown = UnknownFields(allow_unknown)
    try:
        request = model.model_validate(body, context=unknown)
    except ValidationError as error:
        raise _request_error(error) from None
    if unknown.met:
        on_unknown(sorted(set(unknown.met)))
    return request


def _or_null(schema: JsonSchemaValue) -> JsonSchemaValue:
    """Return the schema of a field that may be null, and then counts as absent."""
    said = {name: value for name, value in schema.items() if name not in ("title", "default", "description")}
    about = {name: schema[name] for name in ("description", "default") if schema.get(name) is not None}
    options = said.get("anyOf", [said])
    return {**about, "anyOf": [*(option for option in options if option != {"type": "null"}), {"type": "null"}]}


def wrong_field(name: str, message: str) -> PydanticCustomError:
    """Return what a validator of a whole object raises to blame one of its fields."""
    return _fault("wrong", message, name)


def _fault(kind: str, message: str, name: str) -> PydanticCustomError:
    # The message must not be the template itself: it quotes the client, and braces in it would be read as fields.
    return PydanticCustomError(f"{kind}_field", "{text}", {"text": message, "field": name})


def _request_error(error: ValidationError) -> RequestError:
    first = error.errors(include_url=False, include_input=False)[0]
    context = first.get("ctx", {})
    path = [str(part) for part in first["loc"]]
    code = None
    if first["type"] in ("unknown_field", "unsupported_field", "wrong_field"):
        path.append(str(context["field"]))
        code = None if first["type"] == "wrong_field" else first["type"]
    param = ".".join(path) or None
    message = str(context["error"]) if first["type"] == "value_error" else first["msg"]
    if param is not None and code is None:
        message = f"{_quote(param)}: {message}"
    return RequestError(message, param=None if param is None else param[:MAX_QUOTED_CHARS], code=code)


def _quote(name: str) -> str:
    shown = name if len(name) <= MAX_QUOTED_CHARS else name[:MAX_QUOTED_CHARS] + "..."
    return f"'{shown}'"
