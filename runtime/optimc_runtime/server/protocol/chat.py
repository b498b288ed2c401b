"""The body of `POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, FailFast, Field

from optimc.errors import RequestError
from optimc_runtime.request import MAX_LOGPROBS
from optimc_runtime.server.protocol.generation import GenerationFields
from optimc_runtime.server.protocol.parse import Body, Unsupported

OWN_VARIABLES = frozenset({"messages", "tools", "tokenizer", "add_generation_prompt"})
"""Template variables that the server sets."""

_NO_TOOLS = "this server does not do tool calls"


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


def _template_variables(variables: dict[str, Any]) -> dict[str, Any]:
    taken = sorted(OWN_VARIABLES & set(variables))
    if taken:
        raise ValueError(f"{taken[0]} is not for the request to set")
    return variables


class Message(Body):
    """One turn of the conversation."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        "tool_calls": Unsupported(_NO_TOOLS, ([],)),
        "tool_call_id": Unsupported(_NO_TOOLS),
        "function_call": Unsupported(_NO_TOOLS),
        "audio": Unsupported("this server does text only"),
        "refusal": Unsupported("no template has a place for refusals"),
        "annotations": Unsupported("no template has a place for annotations", ([],)),
    }

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_joined_text)]
    """Text, or a list of text parts, which are joined with nothing between them."""
    name: str | None = None
    """Given to the template, which may or may not show it."""

    def for_template(self) -> dict[str, str]:
        """Return the message as templates know it. "developer" is the newer name of "system"."""
        message = {"role": "system" if self.role == "developer" else self.role, "content": self.content}
        return message if self.name is None else {**message, "name": self.name}


class ChatRequest(GenerationFields):
    """A conversation to continue."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        **GenerationFields.unsupported,
        "tools": Unsupported(_NO_TOOLS, ([],)),
        "tool_choice": Unsupported(_NO_TOOLS, ("none", "auto")),
        "parallel_tool_calls": Unsupported(_NO_TOOLS, (True, False)),
        "functions": Unsupported(_NO_TOOLS, ([],)),
        "function_call": Unsupported(_NO_TOOLS, ("none", "auto")),
        "response_format": Unsupported("only {'type': 'text'} is", ({"type": "text"},)),
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

    messages: Annotated[list[Message], FailFast()] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    """The newer name of `max_tokens`."""
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_template_variables)] = Field(default_factory=dict)
    """More variables for the template, such as `enable_thinking`. What a template does not read has no effect."""

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
