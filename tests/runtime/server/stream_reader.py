"""A strict reader of replies: every object against the server's own document, every stream against the API's rules."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jsonschema

from optimc_runtime.server.openapi import document


@cache
def _validator(name: str) -> jsonschema.Draft202012Validator:
    components = document("any", has_keys=False, has_page=True)["components"]
    return jsonschema.Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": components})


def conforms(name: str, value: Any) -> None:
    """Hold a value against a schema of the server's own OpenAPI document, which leaves no room for other fields."""
    _validator(name).validate(value)


@dataclass
class StreamedChoice:
    """One choice put together from its chunks."""

    text: str = ""
    finish_reason: str | None = None
    logprobs: Any = None
    token_ids: list[int] = field(default_factory=list)
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    """As a whole message would have them."""


@dataclass
class ReadStream:
    """A whole streamed reply, checked against the API's rules."""

    choices: dict[int, StreamedChoice]
    usage: dict[str, Any] | None
    error: dict[str, Any] | None
    chunks: list[dict[str, Any]]
    events: list[str]


def check_error(body: dict[str, Any]) -> dict[str, Any]:
    """Check an error object's shape and return it."""
    conforms("Error", body)
    error: dict[str, Any] = body["error"]
    return error


def check_usage(usage: dict[str, Any]) -> None:
    """Check a usage object's shape and sums."""
    conforms("Usage", usage)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]


def check_stream(raw: bytes, *, chat: bool, n: int, include_usage: bool) -> ReadStream:
    """Read raw server-sent events and enforce every rule of the stream's shape."""
    text = raw.decode("ascii")
    assert text.endswith("\n\n")
    events = text.removesuffix("\n\n").split("\n\n")
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    data = [event.removeprefix("data: ") for event in events]
    result = ReadStream({}, None, None, [], events)
    *body, last = data
    failed = '"error"' in last
    if failed:
        result.error = check_error(json.loads(last))
    else:
        assert last == "[DONE]"
    if include_usage and not failed:
        *body, tail = body
        final = json.loads(tail)
        conforms("ChatChunk" if chat else "CompletionChunk", final)
        assert final["choices"] == []
        check_usage(final["usage"])
        result.usage = final["usage"]
        result.chunks.append(final)
    heads = set()
    for line in body:
        chunk = json.loads(line)
        conforms("ChatChunk" if chat else "CompletionChunk", chunk)
        assert ("usage" in chunk) == include_usage
        assert chunk.get("usage") is None
        heads.add((chunk["id"], chunk["created"], chunk["model"]))
        [choice] = chunk["choices"]
        _check_chunk(choice, result.choices, chat=chat, n=n)
        result.chunks.append(chunk)
    assert len(heads) <= 1
    if not failed:
        assert sorted(result.choices) == list(range(n))
        assert all(choice.finish_reason for choice in result.choices.values())
    return result


def _check_chunk(choice: dict[str, Any], choices: dict[int, StreamedChoice], *, chat: bool, n: int) -> None:
    index = choice["index"]
    assert 0 <= index < n
    begun = index in choices
    state = choices.setdefault(index, StreamedChoice())
    assert state.finish_reason is None, "nothing may follow the finish reason"
    if chat:
        delta = choice["delta"]
        assert ("role" in delta) == (not begun), "the role comes first, and once"
        assert (delta == {}) == (choice["finish_reason"] is not None), "the reason comes alone"
        state.text += delta.get("content") or ""
        for call in delta.get("tool_calls", []):
            _add_call(state.tool_calls, call)
    else:
        state.text += choice["text"]
    state.finish_reason = choice["finish_reason"]
    state.token_ids += choice.get("token_ids", [])
    if choice["logprobs"] is not None:
        gathered = state.logprobs or {key: [] for key in choice["logprobs"]}
        for key, values in choice["logprobs"].items():
            gathered[key] = None if values is None else gathered[key] + values
        state.logprobs = gathered


def _add_call(calls: list[dict[str, Any]], delta: dict[str, Any]) -> None:
    if "id" in delta:
        assert delta["index"] == len(calls), "calls begin in order"
        calls.append({"id": delta["id"], "type": delta["type"], "function": dict(delta["function"])})
    else:
        assert delta["index"] == len(calls) - 1, "one call after the other"
        calls[-1]["function"]["arguments"] += delta["function"]["arguments"]
