"""The document says what is served: every route, every field, every answer."""

from __future__ import annotations

import json

import jsonschema
import pytest

from optimc_runtime.server import ServerOptions
from optimc_runtime.server.app import ROUTES
from optimc_runtime.server.keys import KeyRing
from optimc_runtime.server.openapi import document
from optimc_runtime.server.protocol.chat import ChatRequest
from optimc_runtime.server.protocol.completions import CompletionRequest

DOCUMENT = document("m", has_keys=True, has_page=True)
OPERATIONS = {(path, method): op for path, item in DOCUMENT["paths"].items() for method, op in item.items()}


def refs_in(value):
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for inner in value.values():
            yield from refs_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from refs_in(inner)


def schema_of(name):
    return {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}


def test_it_is_valid():
    schemathesis = pytest.importorskip("schemathesis", reason="the extra `fuzz` is not installed")
    schemathesis.openapi.from_dict(DOCUMENT).validate()


def test_every_schema_is_one_and_every_reference_leads_somewhere():
    for schema in DOCUMENT["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    names = {f"#/components/schemas/{name}" for name in DOCUMENT["components"]["schemas"]}
    assert set(refs_in(DOCUMENT)) == names - {
        # Named in words: OpenAPI cannot say that a body is events.
        "#/components/schemas/ChatChunk",
        "#/components/schemas/CompletionChunk",
    }


@pytest.mark.parametrize("show_page", [True, False])
def test_it_has_every_route_and_no_other(start_server, engine, template, show_page):
    routes = {
        (path.replace(":path", ""), method.lower())
        for method, path, _ in ROUTES
        if show_page or (not path.startswith(("/page", "/dashboard")) and path != "/")
    }
    with start_server(engine, template, ServerOptions(show_page=show_page)) as served:
        told = served.http.get("/openapi.json").json()
    assert {(path, method) for path, item in told["paths"].items() for method in item} == routes


def test_what_needs_a_key_says_so_and_the_document_itself_needs_none(start_server, engine, template):
    keys = KeyRing.from_text("alice:0123456789abcdef")
    with start_server(engine, template, ServerOptions(), keys=keys) as served:
        told = served.http.get("/openapi.json").json()
        for path, item in told["paths"].items():
            for method, operation in item.items():
                reply = served.http.request(method, path.replace("{model}", "m").replace("{name}", "app.js"), json={})
                assert (reply.status_code == 401) == ("security" in operation) == ("401" in operation["responses"])
    open_server = document("m", has_keys=False, has_page=True)
    assert "securitySchemes" not in open_server["components"]
    assert "security" not in json.dumps(open_server["paths"])


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/scripted", "/health", "/health/live", "/health/ready"])
def test_small_answers_are_as_described(served, path):
    template = path.replace("scripted", "{model}")
    answer = OPERATIONS[template, "get"]["responses"]["200"]["content"]["application/json"]["schema"]
    reply = served.http.get(path)
    jsonschema.validate(reply.json(), {**answer, "components": DOCUMENT["components"]})


def test_a_sick_server_is_as_described(served, conforms):
    served.engine.stalled = 100.0
    for path in ("/health", "/health/live", "/health/ready"):
        reply = served.http.get(path)
        assert reply.status_code == 503
        conforms("Unhealthy", reply.json())


def test_media_types_are_as_described(served):
    for path in ("/metrics", "/", "/dashboard.json"):
        kind = served.http.get(path).headers["content-type"].split(";")[0]
        assert kind in OPERATIONS[path, "get"]["responses"]["200"]["content"]
    for name in ("app.js", "style.css", "index.html"):
        kind = served.http.get(f"/page/{name}").headers["content-type"].split(";")[0]
        assert kind in OPERATIONS["/page/{name}", "get"]["responses"]["200"]["content"]


# Fields as a client may send them, with the path they go to; the server and the document must agree on each.
BODIES = {
    "plain": (CompletionRequest, {"prompt": "a"}),
    "ids": (CompletionRequest, {"prompt": [[20, 21], [22]]}),
    "nulls": (CompletionRequest, {"prompt": "a", "stop": None, "n": None, "stream_options": None}),
    "one stop": (CompletionRequest, {"prompt": "a", "stop": "x"}),
    "four stops": (CompletionRequest, {"prompt": "a", "stop": ["a", "b", "c", "d"]}),
    "bias": (CompletionRequest, {"prompt": "a", "logit_bias": {"20": -1.5}}),
    "off": (CompletionRequest, {"prompt": "a", "speculation": False}),
    "neutral": (CompletionRequest, {"prompt": "a", "suffix": "", "use_beam_search": False, "user": {"any": 1}}),
    "echo alone": (CompletionRequest, {"prompt": "a", "echo": True, "max_tokens": 0}),
    "parts": (ChatRequest, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}),
    "kwargs": (
        ChatRequest,
        {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"enable_thinking": True}},
    ),
    "five stops": (CompletionRequest, {"prompt": "a", "stop": list("abcde")}),
    "hot": (CompletionRequest, {"prompt": "a", "temperature": 101}),
    "nothing left": (CompletionRequest, {"prompt": "a", "top_p": 0}),
    "urgent": (CompletionRequest, {"prompt": "a", "priority": -101}),
    "unknown": (CompletionRequest, {"prompt": "a", "x": 1}),
    "unsupported": (CompletionRequest, {"prompt": "a", "suffix": "b"}),
    "no prompt": (CompletionRequest, {"n": 1}),
    "mixed prompt": (CompletionRequest, {"prompt": ["a", 1]}),
    "no messages": (ChatRequest, {"messages": []}),
    "picture": (ChatRequest, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    "robot": (ChatRequest, {"messages": [{"role": "robot", "content": "a"}]}),
}


@pytest.mark.parametrize("name", BODIES)
def test_the_document_and_the_server_take_the_same_bodies(served, name):
    model, body = BODIES[name]
    path = "/v1/completions" if model is CompletionRequest else "/v1/chat/completions"
    taken = served.http.post(path, json=body).status_code == 200
    assert jsonschema.Draft202012Validator(schema_of(model.__name__)).is_valid(body) == taken
