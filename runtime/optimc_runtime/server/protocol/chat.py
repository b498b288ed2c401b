"""The body of `POST /v1/chat/completions`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, FailFast, Field, WithJsonSchema, model_validator

from optimc.errors import RequestError
from optimc_runtime.request import MAX_LOGPROBS
from optimc_runtime.server.protocol.generation import GenerationFields
from optimc_runtime.server.protocol.parse import Body, Unsupported, wrong_field
from optimc_runtime.server.protocol.tools import MAX_TOOLS, NamedTool, Tool, ToolCall

OWN_VARIABLES = frozenset({"messages", "tools", "tokenizer", "add_generation_prompt"})
"""Template variables that the server sets."""

MAX_MESSAGES = 10_000
"""Of a conversation, calls in them counted too: each is checked while the streams of others stand still."""

MAX_VARIABLE_VALUES = 10_000
"""In `chat_template_kwargs`: each is looked through for spelled-out special tokens."""

MAX_TOOLS_BYTES = 64 << 10
"""Of all tools of a request, as JSON."""

_CONTENT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                "required": ["type", "text"],
                "additionalProperties": False,
            },
        },
    ]
}


def _joined_text(content: object) -> object:
    """Join text parts in order, with nothing between them. Other kinds of part are refused, never skipped."""
    if not isinstance(content, list):
        return content
    texts: list[str] = []
    for index, part in enumerate(content):
        if not isinstance(part, dict):
            raise ValueError(f"part {index} must be an object with type and text")
        if part.get("type") != "text":
            raise ValueError(f"part {index} has type {str(part.get('type'))[:40]!r}; this model reads text parts only")
        if not isinstance(part.get("text"), str):
            raise ValueError(f"part {index} has no text")
        surplus = [name for name, value in part.items() if name not in ("type", "text") and value is not None]
        if surplus:
            raise ValueError(f"part {index} has an unknown field {surplus[0][:40]!r}")
        texts.append(part["text"])
    return "".join(texts)


def tools_text(tools: Sequence[Tool]) -> str:
    """Return tools as JSON, as a template may write them. Raises RequestError if one is nested too deeply."""
    try:
        return json.dumps([tool.for_template() for tool in tools], ensure_ascii=False)
    except (RecursionError, ValueError):
        raise RequestError("tools: a schema is nested too deeply", param="tools") from None


def _repeated(names: list[str]) -> str:
    return next(name for name in names if names.count(name) > 1)


def _template_variables(variables: dict[str, Any]) -> dict[str, Any]:
    taken = sorted(OWN_VARIABLES & set(variables))
    if taken:
        raise ValueError(f"{taken[0]} is not for the request to set")
    if _is_larger(variables, MAX_VARIABLE_VALUES):
        raise ValueError(f"holds more than {MAX_VARIABLE_VALUES:,} values, nested ones included")
    return variables


def _is_larger(value: Any, limit: int) -> bool:
    """Whether there are more than `limit` values in JSON; those beyond are not counted."""
    count, left = 0, [value]
    while left and count <= limit:
        inner = left.pop()
        if isinstance(inner, dict | list):
            count += len(inner)
            if count <= limit:
                left.extend(inner.values() if isinstance(inner, dict) else inner)
    return count > limit


class Message(Body):
    """One turn of the conversation."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        "function_call": Unsupported("the newer tool_calls are"),
        "audio": Unsupported("this server does text only"),
        "refusal": Unsupported("no template has a place for refusals"),
        "annotations": Unsupported("no template has a place for annotations", ([],)),
    }

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(_joined_text), WithJsonSchema(_CONTENT_SCHEMA)] = None
    """Text, or a list of text parts, which are joined with nothing between them. An assistant's may be absent where
    there are tool_calls."""
    name: str | None = None
    """Given to the template, which may or may not show it."""
    tool_calls: Annotated[list[ToolCall], FailFast()] = Field(default_factory=list, max_length=MAX_TOOLS)
    """Calls that the assistant made."""
    tool_call_id: str | None = Field(default=None, min_length=1, max_length=64)
    """Which call a tool's message answers."""

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise wrong_field("tool_calls", f"are the assistant's, not the {self.role}'s")
        if self.tool_call_id is not None and self.role != "tool":
            raise wrong_field("tool_call_id", f"is for the role tool, not {self.role}")
        if self.role == "tool" and self.tool_call_id is None:
            raise wrong_field("tool_call_id", "is missing: it says which call the message answers")
        if self.content is None and not self.tool_calls:
            raise wrong_field("content", "is missing")
        return self

    @property
    def tells_of_calls(self) -> bool:
        """Whether only a template that knows of tools can show the message."""
        return self.role == "tool" or bool(self.tool_calls)

    @property
    def text(self) -> str:
        """All that the message says, calls included."""
        return "".join([self.content or "", *(call.function.arguments for call in self.tool_calls)])

    def for_template(self) -> dict[str, Any]:
        """Return the message as templates know it. "developer" is the newer name of "system"."""
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.content or "",
        }
        if self.name is not None:
            message["name"] = self.name
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


def _few_enough(messages: object) -> object:
    if isinstance(messages, list):
        calls = [message.get("tool_calls") for message in messages if isinstance(message, dict)]
        count = len(messages) + sum([len(each) for each in calls if isinstance(each, list)])
        if count > MAX_MESSAGES:
            raise ValueError(f"are {count:,}, calls counted too; at most {MAX_MESSAGES:,} are taken")
    return messages


Messages = Annotated[list[Message], FailFast(), BeforeValidator(_few_enough), Field(max_length=MAX_MESSAGES)]
"""A conversation."""


class ChatRequest(GenerationFields):
    """A conversation to continue."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        **GenerationFields.unsupported,
        "functions": Unsupported("the newer tools are", ([],)),
        "function_call": Unsupported("the newer tool_choice is", ("none", "auto")),
        "modalities": Unsupported("only ['text'] is", (["text"],)),
        "audio": Unsupported("this server does text only"),
        "prediction": Unsupported("predicted outputs are not implemented"),
        "reasoning_effort": Unsupported("the model's template decides", ("none",)),
        "verbosity": Unsupported("the model knows no such setting", ("medium",)),
        "web_search_options": Unsupported("the model has no web access"),
        "store": Unsupported("answers are not kept", (False,)),
        "add_generation_prompt": Unsupported("the assistant always speaks next", (True,)),
        "continue_final_message": Unsupported("the assistant always starts a new message", (False,)),
    }

    messages: Messages = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    """The newer name of `max_tokens`."""
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_template_variables)] = Field(default_factory=dict)
    """More variables for the template, such as `enable_thinking`. What a template does not read has no effect."""
    tools: Annotated[list[Tool], FailFast()] = Field(default_factory=list, max_length=MAX_TOOLS)
    """Functions the model may call."""
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    """Whether it may (auto), must (required), or which one it must call; what must be called keeps to its schema."""
    parallel_tool_calls: bool = True
    """Whether an answer that must call may hold more than one call."""

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise RequestError(f"tools: two functions are named {_repeated(names)!r}", param="tools")
        size = len(tools_text(self.tools)) if self.tools else 0
        if size > MAX_TOOLS_BYTES:
            raise RequestError(f"tools: {size:,} bytes; at most {MAX_TOOLS_BYTES:,} are taken", param="tools")
        choice = self.tool_choice
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise RequestError(f"tool_choice: {choice.function.name!r} is none of tools", param="tool_choice")
        if choice == "required" and not names:
            raise RequestError("tool_choice required needs tools", param="tool_choice")
        if choice in (None, "auto") and any(tool.function.strict for tool in self.tools):
            raise RequestError("strict needs tool_choice required or a named function", param="tools")
        if self.shown_tools and self.logprobs:
            raise RequestError(
                "logprobs do not go with tools: pieces of calls and tokens do not line up", param="logprobs"
            )
        return self

    @property
    def shown_tools(self) -> list[Tool]:
        """The tools that the model gets to see."""
        return [] if self.tool_choice == "none" else self.tools

    def token_limit(self) -> int | None:
        """Return the most output tokens, by either name."""
        names = (self.max_tokens, self.max_completion_tokens)
        if None not in names and self.max_tokens != self.max_completion_tokens:
            raise RequestError(
                f"max_tokens {self.max_tokens} and max_completion_tokens {self.max_completion_tokens} differ; send one",
                param="max_tokens",
            )
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    def logprob_count(self) -> int | None:
        """Return `top_logprobs` if `logprobs` is true."""
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs=true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None
