"""Traffic by a seed: applications with a system prompt, examples and their users' own questions, growing
conversations, and each thing planted that keeps requests from sharing their prefix."""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from optimc.measure.load.traffic import TrafficLine

NOW_S = 1_795_000_000.0
"""Seconds since the epoch: November 2026."""
WORDS = (  # noqa: SIM905 - a list would take a page
    "the of a to and in is for that with on as are this by be from or it an which at will can has not all their "
    "river market engine copper garden letter window signal harbour winter metal planet doctor morning paper bridge "
    "answer record number column reader server policy refund invoice parcel warranty branch commit review merge table "
    "query index update schema report budget forecast quarter revenue margin supplier contract clause tenant lease"
).split()

Plant = Callable[["Request", random.Random], None]


@dataclass
class Request:
    """One request before it is written."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]


def text(draw: random.Random, words: int) -> str:
    """Return so many words as sentences."""
    chosen = [draw.choice(WORDS) for _ in range(words)]
    for at in range(0, words, 11):
        chosen[at] = chosen[at].capitalize()
        if at:
            chosen[at - 1] += "."
    return " ".join(chosen) + "."


class App:
    """One application: what all its requests begin with."""

    def __init__(self, seed: int, number: int, *, tools: int = 0) -> None:
        draw = random.Random(f"app {seed} {number}")
        self.system = f"You are assistant {chr(65 + number)}. " + text(draw, 120)
        self.shots: list[dict[str, Any]] = []
        for _ in range(2):
            self.shots += [
                {"role": "user", "content": text(draw, 20)},
                {"role": "assistant", "content": text(draw, 30)},
            ]
        self.tools = [_tool(draw, name) for name in range(tools)]

    def request(self, draw: random.Random) -> Request:
        question = {"role": "user", "content": text(draw, draw.randrange(5, 60))}
        messages = [{"role": "system", "content": self.system}, *self.shots, question]
        return Request(json.loads(json.dumps(messages)), json.loads(json.dumps(self.tools)))


def _tool(draw: random.Random, number: int) -> dict[str, Any]:
    names = draw.sample(WORDS[18:], 3)
    properties = {name: {"type": "string", "description": text(draw, 8)} for name in names}
    parameters = {"type": "object", "properties": properties, "required": names[:1]}
    function = {"name": f"{names[0]}_{number}", "description": text(draw, 15), "parameters": parameters}
    return {"type": "function", "function": function}


# What may be planted. Each changes a request that shared its prefix before.


def timestamp(request: Request, draw: random.Random) -> None:
    at = draw.randrange(86_400)
    clock = f"2026-11-{draw.randrange(1, 31):02}T{at // 3600:02}:{at // 60 % 60:02}:{at % 60:02}Z"
    request.messages[0]["content"] = f"The time is {clock}. " + request.messages[0]["content"]


def request_id(request: Request, draw: random.Random) -> None:
    name = uuid.UUID(int=draw.getrandbits(128))
    request.messages[0]["content"] = f"Request {name}. " + request.messages[0]["content"]


def tool_order(request: Request, draw: random.Random) -> None:
    draw.shuffle(request.tools)


def key_order(request: Request, draw: random.Random) -> None:
    for tool in request.tools:
        properties = tool["function"]["parameters"]["properties"]
        items = list(properties.items())
        draw.shuffle(items)
        tool["function"]["parameters"]["properties"] = dict(items)


def user_before_shared(request: Request, draw: random.Random) -> None:
    request.messages[0]["content"] = f"About the user: {text(draw, 12)}\n\n" + request.messages[0]["content"]


def whitespace(request: Request, draw: random.Random) -> None:
    words = request.messages[0]["content"].split(" ")
    request.messages[0]["content"] = "".join(word + draw.choice([" ", " ", "  ", "\n", " \r\n"]) for word in words)


PLANTS: dict[str, Plant] = {
    "timestamp": timestamp,
    "id": request_id,
    "tool_order": tool_order,
    "key_order": key_order,
    "user_before_shared": user_before_shared,
    "whitespace": whitespace,
}


def planted(seed: int, kinds: Sequence[str], requests: int = 500, *, apps: int = 3) -> list[TrafficLine]:
    """Return traffic of several applications, the first of which has all of `kinds` planted in it."""
    draw = random.Random(f"traffic {seed}")
    needs_tools = bool({"tool_order", "key_order"} & set(kinds))
    known = [App(seed, number, tools=4 if needs_tools and number == 0 else 0) for number in range(apps)]
    lines = []
    for number in range(requests):
        app = draw.randrange(apps)
        request = known[app].request(draw)
        if app == 0:
            for kind in kinds:
                PLANTS[kind](request, draw)
        lines.append(line(number, request))
    return lines


def clean(seed: int, requests: int = 500) -> list[TrafficLine]:
    """Return traffic in which nothing stands before what is shared: single questions, some of which begin with a date,
    and conversations that grow, in which the same long refusal may come up anywhere."""
    draw = random.Random(f"clean {seed}")
    apps = [App(seed, number, tools=3 * (number == 1)) for number in range(4)]
    refusal = text(random.Random("refusal"), 40)
    talks: list[Request] = []
    lines = []
    for number in range(requests):
        request = draw.choice(apps).request(draw)
        if draw.random() < 0.3:
            date = f"2026-11-{draw.randrange(1, 31):02}: "
            request.messages[-1]["content"] = date + request.messages[-1]["content"]
        if draw.random() < 0.4:
            if talks and draw.random() < 0.7:
                talk = draw.choice(talks)
                reply = refusal if draw.random() < 0.2 else text(draw, 25)
                talk.messages.append({"role": "assistant", "content": reply})
                talk.messages.append({"role": "user", "content": text(draw, draw.randrange(3, 30))})
                request = Request(list(talk.messages), talk.tools)
            else:
                talks.append(request)
                request = Request(list(request.messages), request.tools)
        lines.append(line(number, request))
    return lines


def line(number: int, request: Request) -> TrafficLine:
    return TrafficLine(
        number=number + 1,
        at_s=0.25 * number,
        endpoint="chat",
        messages=tuple(request.messages),
        tools=tuple(request.tools),
    )


def as_json(each: TrafficLine) -> str:
    """Return a line as a server's log has it."""
    row: dict[str, Any] = {"format": 1, "at_s": each.at_s, "endpoint": each.endpoint, "messages": list(each.messages)}
    if each.tools:
        row["tools"] = list(each.tools)
    return json.dumps(row, ensure_ascii=False)
