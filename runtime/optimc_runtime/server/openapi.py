"""`GET /openapi.json`: what this server serves, as an OpenAPI 3.1 document."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from pydantic.json_schema import models_json_schema
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from optimc_runtime.server.context import ServerContext
from optimc_runtime.server.protocol.chat import ChatRequest
from optimc_runtime.server.protocol.completions import CompletionRequest
from optimc_runtime.server.protocol.parse import Body
from optimc_runtime.server.protocol.tokenize import DetokenizeRequest, TokenizeRequest

REF = "#/components/schemas/{model}"

FAILURES = {
    400: "The request cannot be honoured; the error names the field.",
    401: "No API key, or a wrong one.",
    404: "There is no such thing here.",
    408: "The body did not come in time.",
    413: "The body is too large.",
    429: "Too much is waiting already; `Retry-After` says when to come again.",
    500: "A fault of the server.",
    503: "The server is shutting down.",
    504: "The request took longer than the server allows.",
}
BODY_FAILURES = (400, 404, 408, 413, 500, 503, 504)
GENERATION_FAILURES = (*BODY_FAILURES, 429)


async def openapi(context: ServerContext, _request: Request) -> Response:
    """Answer with the document."""
    has_keys, has_page = context.keys is not None, context.options.show_page
    text = await run_in_threadpool(_rendered, context.model_name, has_keys=has_keys, has_page=has_page)
    return Response(text, media_type="application/json")


@lru_cache(maxsize=1)
def _rendered(model_name: str, *, has_keys: bool, has_page: bool) -> bytes:
    return json.dumps(document(model_name, has_keys=has_keys, has_page=has_page)).encode()


def document(model_name: str, *, has_keys: bool, has_page: bool) -> dict[str, Any]:
    """Return the document of a server of `model_name`."""
    # Not at import: a server starts without knowing how to describe itself.
    from optimc_runtime.server.openapi_responses import SCHEMAS

    requests: tuple[type[Body], ...] = (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)
    _, described = models_json_schema([(request, "validation") for request in requests], ref_template=REF)
    asked = described.get("$defs", {})
    assert asked.keys().isdisjoint(SCHEMAS), "a request's model has the name of an answer's"
    paths = _page_paths(has_keys) if has_page else {}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": f"optimc, serving {model_name}",
            "version": "1",
            "description": "The OpenAI API as far as it is served here; what is not is refused by name, with 400.",
        },
        "paths": {**_api_paths(has_keys), **paths},
        "components": {
            "schemas": {**asked, **SCHEMAS},
            **({"securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}}} if has_keys else {}),
        },
    }


def _api_paths(has_keys: bool) -> dict[str, Any]:
    def keyed(operation: dict[str, Any]) -> dict[str, Any]:
        return _with_key(operation) if has_keys else operation

    health = _operation("Whether it moves", {"application/json": "Health"}, (500, 504))
    health["responses"]["503"] = _response("It does not, or takes no more requests.", {"application/json": "Unhealthy"})
    one_model = _operation("The model, by name", {"application/json": "Model"}, (404, 500, 504))
    one_model["parameters"] = [_parameter("model")]
    return {
        "/v1/chat/completions": {
            "post": keyed(_generation("Continue a conversation", ChatRequest, "ChatCompletion", "ChatChunk"))
        },
        "/v1/completions": {
            "post": keyed(_generation("Continue prompts", CompletionRequest, "Completion", "CompletionChunk"))
        },
        "/tokenize": {"post": keyed(_call("Text or messages to token ids", TokenizeRequest, "Tokens"))},
        "/detokenize": {"post": keyed(_call("Token ids to text", DetokenizeRequest, "TokenText"))},
        "/v1/models": {"get": keyed(_operation("The models", {"application/json": "ModelList"}, (500, 504)))},
        "/v1/models/{model}": {"get": keyed(one_model)},
        "/health": {"get": health},
        "/health/live": {"get": health},
        "/health/ready": {"get": health},
        "/metrics": {"get": keyed(_operation("Figures for Prometheus", {"text/plain": None}, (500, 504)))},
        "/openapi.json": {"get": _operation("This document", {"application/json": "Document"}, (500, 504))},
    }


def _page_paths(has_keys: bool) -> dict[str, Any]:
    figures = _operation("What the page shows", {"application/json": "Figures"}, (500, 504))
    part = _operation(
        "A part of the page", {"text/html": None, "text/javascript": None, "text/css": None}, (404, 500, 504)
    )
    part["parameters"] = [_parameter("name")]
    return {
        "/": {"get": _operation("The page", {"text/html": None}, (500, 504))},
        "/page/{name}": {"get": part},
        "/dashboard.json": {"get": _with_key(figures) if has_keys else figures},
    }


def _generation(summary: str, request: type[Body], whole: str, chunk: str) -> dict[str, Any]:
    operation = _call(summary, request, whole, GENERATION_FAILURES)
    # Each event is `data: ` and a chunk, or, in the end, an error or `[DONE]`: OpenAPI has no word for that, so the
    # chunk's schema is named and not claimed of the whole text.
    operation["responses"]["200"]["content"]["text/event-stream"] = {
        "schema": {"type": "string", "description": f"Events, each a {chunk} or, last, an Error or [DONE]."}
    }
    return operation


def _call(summary: str, request: type[Body], answer: str, failures: tuple[int, ...] = BODY_FAILURES) -> dict[str, Any]:
    operation = _operation(summary, {"application/json": answer}, failures)
    operation["requestBody"] = {
        "required": True,
        "content": {"application/json": {"schema": {"$ref": REF.format(model=request.__name__)}}},
    }
    return operation


def _operation(summary: str, contents: dict[str, str | None], failures: tuple[int, ...]) -> dict[str, Any]:
    """Return an operation that answers 200 with `contents`, media types to schemas by name."""
    return {
        "summary": summary,
        "responses": {
            "200": _response("As asked.", contents),
            **{str(status): _failure(status) for status in sorted(failures)},
        },
    }


def _with_key(operation: dict[str, Any]) -> dict[str, Any]:
    responses = {**operation["responses"], "401": _failure(401)}
    return {**operation, "responses": dict(sorted(responses.items())), "security": [{"bearer": []}]}


def _failure(status: int) -> dict[str, Any]:
    return _response(FAILURES[status], {"application/json": "Error"}, retry=status == 429)


def _response(description: str, contents: dict[str, str | None], *, retry: bool = False) -> dict[str, Any]:
    text = {"type": "string"}
    wait = {"Retry-After": {"description": "Seconds.", "required": True, "schema": {"type": "string"}}}
    return {
        "description": description,
        "headers": {"X-Request-Id": {"required": True, "schema": text}, **(wait if retry else {})},
        "content": {
            media: {"schema": text if name is None else {"$ref": REF.format(model=name)}}
            for media, name in contents.items()
        },
    }


def _parameter(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
