"""A request as the model of a plan reads it: its chat template, its tokens, and where in them each field went."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Backend

from optimc.errors import ConfigError, Fault
from optimc.measure.load.traffic import TrafficLine
from optimc.measure.prefix.rendered import MAX_UNITS, Rendered, message_fields
from optimc.measure.prefix.span import Span, covering, json_spans
from optimc.plan import Plan
from optimc.plan.tensor_names import TOKENIZER
from optimc_runtime.chat_template import ChatTemplate
from optimc_runtime.token_backend import load_backend
from optimc_runtime.tokenizer import Tokenizer

_TOOL_STYLES: Sequence[Mapping[str, Any]] = (
    {},
    {"indent": 4},
    {"indent": 2},
    {"separators": (",", ":")},
    {"ensure_ascii": False},
    {"ensure_ascii": False, "indent": 4},
    {"ensure_ascii": False, "separators": (",", ":")},
)
"""How templates write a tool."""


class PlanRendering:
    """Renders with one plan's tokenizer and template."""

    def __init__(self, tokenizer: Tokenizer, backend: Backend, template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._backend = backend
        self._template = template

    @classmethod
    def from_plan(cls, plan: Plan) -> PlanRendering:
        """Raises ConfigError if the plan has no tokenizer."""
        tokenizer = Tokenizer.from_plan(plan)
        if tokenizer is None:
            raise ConfigError("options", [Fault("--plan", "has no tokenizer; without it, characters are counted")])
        return cls(tokenizer, load_backend(plan.blob(TOKENIZER)), ChatTemplate.from_plan(plan))

    def __call__(self, line: TrafficLine) -> Rendered | None:
        """Return the prompt in tokens: those that were logged, or else what the template makes now. None if the line
        says nothing of what was asked. Raises RequestError for messages that the template refuses."""
        ids = line.prompt_ids if line.prompt_ids is not None else line.prompt
        if isinstance(ids, tuple):
            text, starts = self._text_of(ids)
            return self._rendered(line, text, list(ids), starts)
        if isinstance(line.prompt, str):
            return self._encoded(line, line.prompt, add_special_tokens=True)
        if not line.messages:
            return None
        if self._template is None:
            raise ConfigError("options", [Fault("--plan", "has no chat template, and the traffic holds conversations")])
        messages = [_for_template(message) for message in line.messages]
        text = self._template.render(messages, tools=line.tools or None)
        return self._encoded(line, text, add_special_tokens=False)

    def _encoded(self, line: TrafficLine, text: str, *, add_special_tokens: bool) -> Rendered:
        encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        ids, starts = list(encoding.ids), [start for start, _ in encoding.offsets]
        bos = self._tokenizer.bos_id
        if not add_special_tokens and bos is not None and self._tokenizer.adds_bos and ids[:1] != [bos]:
            ids, starts = [bos, *ids], [0, *starts]
        return self._rendered(line, text, ids, starts)

    def _rendered(self, line: TrafficLine, text: str, ids: list[int], starts: list[int]) -> Rendered:
        tokens = line.prompt_tokens if line.prompt_tokens is not None else len(ids)
        # Marks without text of their own, such as a BOS that is added, have no offset: none may lie before another.
        places = np.maximum.accumulate(np.array(starts, np.int32))
        cut = text if len(ids) <= MAX_UNITS else text[: int(places[MAX_UNITS])]
        units = np.array(ids[:MAX_UNITS], np.int32)
        return Rendered(line, cut, covering(located(line, cut), len(cut)), units, places[:MAX_UNITS], 1, tokens)

    def _text_of(self, ids: Sequence[int]) -> tuple[str, list[int]]:
        """Return the text of ids that were logged, and where each begins in it."""
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        encoding = self._backend.encode(text, add_special_tokens=False)
        if list(encoding.ids) == list(ids):
            return text, [start for start, _ in encoding.offsets]
        # Not what the tokenizer would make of the text, as with half a character: piece by piece, then.
        pieces = [self._tokenizer.decode([token_id], skip_special_tokens=False) for token_id in ids]
        starts = np.cumsum([0, *map(len, pieces)])[:-1].tolist()
        return "".join(pieces), starts


def located(line: TrafficLine, text: str) -> list[Span]:
    """Return where the fields of a request stand in its rendered text, looked for in order."""
    if not line.messages:
        return [Span(_end_of_marks(text), len(text), "prompt")]
    spans = _located_tools(line.tools, text)
    at = 0
    for index, message in enumerate(line.messages):
        for field, path in message_fields(index, message):
            # Templates trim; a content that is found nowhere, such as a call worded anew, is left to the template.
            for wanted in (field, field.strip()):
                found = text.find(wanted, at) if wanted else -1
                if found >= 0:
                    spans.append(Span(found, found + len(wanted), path))
                    at = found + len(wanted)
                    break
    return spans


def _located_tools(tools: Sequence[Mapping[str, Any]], text: str) -> list[Span]:
    spans: list[Span] = []
    at = 0
    for index, tool in enumerate(tools):
        written = [json.dumps(value, **style) for style in _TOOL_STYLES for value in (tool, tool.get("function"))]
        found, word = next(((text.find(word, at), word) for word in written if text.find(word, at) >= 0), (-1, ""))
        if found < 0:
            continue
        whole = any(word == json.dumps(tool, **style) for style in _TOOL_STYLES)
        path = f"tools[{index}]" if whole else f"tools[{index}].function"
        at = found + len(word)
        spans += json_spans(tool if whole else tool["function"], text, found, at, path)
    return spans


def _end_of_marks(text: str) -> int:
    """Return where a text stops repeating its first mark, such as `<s>`: that is no field's, if it is there twice."""
    mark = text[: text.find(">") + 1]
    if not mark.startswith("<") or len(mark) > 30:
        return 0
    end = 0
    while text.startswith(mark, end):
        end += len(mark)
    return end


def _for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message of the API as templates know it: plain text, the older role, arguments as objects."""
    result = {name: value for name, value in message.items() if value is not None}
    result["role"] = "system" if message.get("role") == "developer" else message.get("role")
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(part.get("text") or "" for part in content if isinstance(part, dict))
    result["content"] = content or ""
    if message.get("tool_calls"):
        result["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    return result


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            function["arguments"] = json.loads(arguments)
        except ValueError:
            function["arguments"] = {}
    return {**call, "function": function}
