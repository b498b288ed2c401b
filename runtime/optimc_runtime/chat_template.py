"""Chat messages to prompt text and ids, by the model's own Jinja template.

Templates are rendered the way transformers renders them (same environment, filters, globals and variables), inside
Jinja's immutable sandbox: a template comes with a checkpoint and is not trusted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import meta, nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from optimc.errors import PlanError, RequestError
from optimc.plan import Plan
from optimc.plan.tensor_names import CHAT_TEMPLATE, SPECIAL_TOKENS
from optimc_runtime.tokenizer import Tokenizer

_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """A compiled chat template. Raises PlanError if the template is not valid Jinja."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            variables = meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateSyntaxError as error:
            raise PlanError(f"chat template, line {error.lineno}: {error.message}") from error
        self.supports_tools = "tools" in variables
        """Whether the template shows the model the tools it may call."""

    @classmethod
    def from_plan(cls, plan: Plan, *, source: str | None = None) -> ChatTemplate | None:
        """Return the plan's template, None if it carries none: a base model has no chat format to guess.

        `source`, if given, takes the place of the plan's template; the special tokens stay the plan's.
        """
        if source is None:
            if CHAT_TEMPLATE not in plan:
                return None
            source = plan.blob(CHAT_TEMPLATE).decode()
        special = json.loads(plan.blob(SPECIAL_TOKENS)) if SPECIAL_TOKENS in plan else {}
        return cls(source, special)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **extra: Any,
    ) -> str:
        """Return the prompt text. `extra` are further template variables (`documents`, `enable_thinking`, ...).

        Raises RequestError with the template's own words if it refuses the messages.
        """
        variables = {"documents": None, **self._special_tokens, **extra}
        try:
            return self._template.render(
                messages=[_normalized(message) for message in messages],
                tools=None if tools is None else list(tools),
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
        except jinja2.TemplateError as error:
            raise RequestError(f"chat template: {error.message or error}", param="messages") from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            # The template met a message of a shape it was not written for.
            raise RequestError(f"chat template cannot render these messages: {error}", param="messages") from error

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **extra: Any,
    ) -> list[int]:
        """Return the prompt's ids.

        There is one BOS at the front if the template writes one, or else if the tokenizer would add one to plain text;
        never two. Special tokens come from the template only: spelled out in a message they are ordinary text (see
        `control_tokens`). Raises RequestError as `render` does, and for text that is not valid Unicode.
        """
        inputs = {"messages": list(messages), "tools": tools, **extra}
        guarded, originals = tokenizer.control_tokens.guard(inputs)
        text = self.render(**guarded, add_generation_prompt=add_generation_prompt)
        if originals:
            ids = tokenizer.control_tokens.encode(text, originals)
        else:
            ids = tokenizer.encode(text, add_special_tokens=False)
        bos = tokenizer.bos_id
        if bos is not None and tokenizer.adds_bos and ids[:1] != [bos]:
            return [bos, *ids]
        return ids


def _normalized(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message as templates expect it: no None fields, reasoning under each of its usual names."""
    present = {key: value for key, value in message.items() if value is not None}
    reasoning = next((present[key] for key in _REASONING_FIELDS if key in present), None)
    if reasoning is None:
        return present
    return {"thinking": reasoning, **present, "reasoning_content": reasoning}


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks text for training masks; here it renders its body."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares a plain set

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        render: Callable[..., nodes.Call] = self.call_method
        return nodes.CallBlock(render("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return plain JSON; Jinja's own filter escapes HTML, which would change the prompt."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
