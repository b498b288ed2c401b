"""What becomes of a request's tools: who is shown them, what the answer must be, and how it is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from optimc.errors import RequestError
from optimc_runtime.server.client import PromptTemplate, TextTokenizer
from optimc_runtime.server.protocol.chat import ChatRequest
from optimc_runtime.server.protocol.tools import NamedTool
from optimc_runtime.server.tools.detect import FORMATS, format_of
from optimc_runtime.server.tools.format import ToolFormat
from optimc_runtime.server.tools.parser import ToolParser
from optimc_runtime.structured.grammar_spec import GrammarSpec


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools of a request that a model may or must call."""

    format: ToolFormat
    functions: list[dict[str, Any]]
    spec: GrammarSpec | None
    """The grammar of an answer that must be calls; None: the model decides."""
    is_named: bool
    """Whether the client said which function: then "stop" ends the answer, as in the API."""
    shows_markers: bool
    """Whether the answer's text must show special tokens."""

    def parser(self) -> ToolParser:
        """Return a parser for one answer."""
        return self.format.parser([function["name"] for function in self.functions])


def tool_use(fields: ChatRequest, template: PromptTemplate | None, tokenizer: TextTokenizer | None) -> ToolUse | None:
    """Return what the request's tools mean, None if it has none to be called.

    Raises RequestError: code "tools_unsupported" if the model's chat template knows none, and for wishes that
    contradict each other.
    """
    if fields.shown_tools or any(message.tells_of_calls for message in fields.messages):
        _check_template(template)
    if not fields.shown_tools or template is None or tokenizer is None:
        return None  # without template or tokenizer the request is refused in better words
    tool_format = format_of(template.source)
    assert tool_format is not None
    tools = fields.shown_tools
    choice = fields.tool_choice
    named = choice.function.name if isinstance(choice, NamedTool) else None
    callable_tools = [tool for tool in tools if named is None or tool.function.name == named]
    functions = [tool.for_template()["function"] for tool in callable_tools]
    is_sure = named is not None or choice == "required"
    spec = None
    if is_sure:
        parallel = fields.parallel_tool_calls and named is None
        spec = GrammarSpec("lark", tool_format.grammar(functions, tokenizer, parallel=parallel), "tools")
    return ToolUse(tool_format, functions, spec, named is not None, tool_format.needs_special_tokens(tokenizer))


def _check_template(template: PromptTemplate | None) -> None:
    if template is None or (template.supports_tools and format_of(template.source) is not None):
        return
    reason = (
        f"asks for calls in a format this server cannot read (it reads {', '.join(one.name for one in FORMATS)})"
        if template.supports_tools
        else "has no place for tools"
    )
    raise RequestError(
        f"this model's chat template {reason}; describe them in a message, or serve a model that was taught to call "
        "tools",
        param="tools",
        code="tools_unsupported",
    )
