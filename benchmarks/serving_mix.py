"""What clients of a busy server send, and what each must get: the mix of the soak."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import jsonschema
from serving_hostile import Hostile
from serving_load import Reply, request

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "sizes": {"type": "array", "items": {"type": "integer"}, "maxItems": 4},
        "kind": {"enum": ["small", "large"]},
    },
    "required": ["name", "sizes", "kind"],
    "additionalProperties": False,
}
REGEX = "(yes|no), because [a-z ]{3,40}\\."
TOOL = {
    "type": "function",
    "function": {
        "name": "find_weather",
        "description": "Find the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
QUESTIONS = ("Name three colours.", "What is rain?", "Who are you?", "Count to ten.", "Write a line of a poem.")
CANARY = {"prompt": "Water boils at", "max_tokens": 12, "temperature": 0}
"""Asked again and again: its answer must never change, whoever runs beside it."""

Check = Callable[[Reply], None]
"""Raises AssertionError, in words, for an answer that is not what was asked for."""


@dataclass(frozen=True)
class Errand:
    """One request of one client."""

    kind: str
    data: bytes
    check: Check | None
    """None for a request that must not be served: any 4xx, or a closed connection, is right."""
    leave_after: int | None = None
    """Events of a stream after which the client hangs up; what came until then is not checked."""


class Mix:
    """Draws errands. One per client; equal seeds draw equal ones."""

    def __init__(self, seed: int, *, longest: int, key: str, canary: str | None) -> None:
        """`longest`: most prompt tokens; `canary`: what CANARY answers, None to be asked for it first."""
        self._random = Random(seed)
        self._longest = longest
        self._key = key
        self._canary = canary
        self._hostile = Hostile(seed, headers=f"Authorization: Bearer {key}\r\n" if key else "")
        self._draws: dict[Callable[[], Errand], int] = {
            self._stream: 8, self._whole: 4, self._choices: 2, self._leave: 5, self._leave_whole: 2, self._scored: 1,
            self._json: 3, self._regex: 2, self._tool: 2, self._chat: 4, self._watched: 3, self._bad: 4,
        }  # fmt: skip

    def draw(self) -> Errand:
        """Return what to do next."""
        [draw] = self._random.choices(list(self._draws), list(self._draws.values()))
        return draw()

    def _errand(
        self, kind: str, path: str, body: dict[str, Any], check: Check | None, leave_after: int | None = None
    ) -> Errand:
        if self._random.random() < 0.3:
            body = {**body, "priority": self._random.randint(-5, 5)}
        return Errand(kind, request(path, body, key=self._key), check, leave_after)

    def _prompt(self) -> list[int]:
        """Return token ids: mostly few, sometimes many; a third begin as others do."""
        length = max(2, int(self._longest ** self._random.uniform(0.2, 1)))
        shared = [100 + number % 200 for number in range(length // 2)] if self._random.random() < 0.33 else []
        return shared + self._random.choices(range(100, 300), k=length - len(shared))

    def _question(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self._random.choice(QUESTIONS)}]

    def _sampled(self) -> dict[str, Any]:
        draw = self._random
        fields: dict[str, Any] = {"max_tokens": draw.randint(1, 64), "temperature": draw.choice((0, 0.7, 1.3))}
        for name, value in (("top_p", 0.9), ("seed", 7), ("stop", ["\n\n", "."]), ("presence_penalty", 0.5)):
            if draw.random() < 0.25:
                fields[name] = value
        return fields

    def _stream(self) -> Errand:
        body = {**self._sampled(), "prompt": self._prompt(), "stream": True, "stream_options": {"include_usage": True}}
        return self._errand("stream", COMPLETIONS, body, _check_stream(body, 1))

    def _whole(self) -> Errand:
        body = {**self._sampled(), "prompt": self._prompt()}
        return self._errand("whole", COMPLETIONS, body, _check_whole(body, 1))

    def _choices(self) -> Errand:
        body = {**self._sampled(), "prompt": self._prompt(), "n": 3}
        if self._random.random() < 0.5:
            return self._errand("three choices", COMPLETIONS, body, _check_whole(body, 3))
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        return self._errand("three choices", COMPLETIONS, body, _check_stream(body, 3))

    def _leave(self) -> Errand:
        body = {**self._sampled(), "prompt": self._prompt(), "stream": True, "n": self._random.choice((1, 1, 4))}
        leave_after = self._random.choice((0, 1, 1, 5, 20))
        return self._errand("leaves a stream", COMPLETIONS, body, None, leave_after)

    def _leave_whole(self) -> Errand:
        body = {**self._sampled(), "prompt": self._prompt()}
        return self._errand("leaves a whole answer", COMPLETIONS, body, None, 0)

    def _scored(self) -> Errand:
        body = {"prompt": self._prompt()[:200], "max_tokens": self._random.choice((0, 4)), "echo": True, "logprobs": 2}

        def check(reply: Reply) -> None:
            _check_whole(body, 1)(reply)
            usage, [choice] = reply.json()["usage"], reply.json()["choices"]
            scored = choice["logprobs"]["token_logprobs"]
            assert len(scored) == usage["total_tokens"], "a log-probability per token"
            assert scored[0] is None

        return self._errand("echo and scores", COMPLETIONS, body, check)

    def _chat(self) -> Errand:
        body = {**self._sampled(), "messages": self._question()}
        return self._errand("chat", CHAT, body, _check_whole(body, 1))

    def _json(self) -> Errand:
        wanted = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
        body = {"messages": self._question(), "max_tokens": 100, "response_format": wanted}

        def check(reply: Reply) -> None:
            _check_whole(body, 1)(reply)
            [choice] = reply.json()["choices"]
            if choice["finish_reason"] == "stop":
                jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)

        return self._errand("JSON by schema", CHAT, body, check)

    def _regex(self) -> Errand:
        body = {"prompt": "Is the sky blue? ", "max_tokens": 64, "guided_regex": REGEX}

        def check(reply: Reply) -> None:
            _check_whole(body, 1)(reply)
            [choice] = reply.json()["choices"]
            matches = re.fullmatch(REGEX, choice["text"])
            assert matches or choice["finish_reason"] == "length", choice["text"]

        return self._errand("regex", COMPLETIONS, body, check)

    def _tool(self) -> Errand:
        messages = [{"role": "user", "content": "What is the weather in Oslo?"}]
        body = {"messages": messages, "tools": [TOOL], "tool_choice": "required", "max_tokens": 64}

        def check(reply: Reply) -> None:
            _check_whole(body, 1)(reply)
            [choice] = reply.json()["choices"]
            if choice["finish_reason"] == "tool_calls":
                [call, *_] = choice["message"]["tool_calls"]
                assert call["function"]["name"] == "find_weather"
                assert isinstance(json.loads(call["function"]["arguments"])["city"], str)

        return self._errand("tool call", CHAT, body, check)

    def _watched(self) -> Errand:
        def check(reply: Reply) -> None:
            assert self._canary in (None, reply.json()["choices"][0]["text"]), f"the answer changed: {reply.body!r}"

        return Errand("same answer as ever", request(COMPLETIONS, CANARY, key=self._key), check)

    def _bad(self) -> Errand:
        return Errand("hostile", self._hostile.draw(), None)


def _check_whole(body: dict[str, Any], choices: int) -> Check:
    def check(reply: Reply) -> None:
        answer = reply.json()
        assert [choice["index"] for choice in answer["choices"]] == list(range(choices))
        _check_ends([choice["finish_reason"] for choice in answer["choices"]], answer["usage"], body)

    return check


def _check_stream(body: dict[str, Any], choices: int) -> Check:
    def check(reply: Reply) -> None:
        assert reply.is_finished, f"cut: {reply.events[-1:]}"
        *chunks, last = reply.chunks()
        ends = [choice for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
        assert sorted(choice["index"] for choice in ends) == list(range(choices))
        _check_ends([choice["finish_reason"] for choice in ends], last["usage"], body)

    return check


def _check_ends(reasons: Sequence[str], usage: dict[str, Any], body: dict[str, Any]) -> None:
    assert set(reasons) <= {"stop", "length", "tool_calls"}, reasons
    assert usage["completion_tokens"] <= body["max_tokens"] * len(reasons)
    if isinstance(body.get("prompt"), list):
        assert usage["prompt_tokens"] == len(body["prompt"])
