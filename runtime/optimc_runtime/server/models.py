"""`GET /v1/models` and `GET /v1/models/{model}`."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from optimc_runtime.server.context import ServerContext
from optimc_runtime.server.tools.detect import format_of


async def list_models(context: ServerContext, _request: Request) -> Response:
    """List the one model there is."""
    return JSONResponse({"object": "list", "data": [_model(context)]})


async def retrieve_model(context: ServerContext, request: Request) -> Response:
    """Describe a model by name."""
    context.check_model(request.path_params["model"])
    return JSONResponse(_model(context))


def _model(context: ServerContext) -> dict[str, Any]:
    """Return the API's model object and, behind it, what a client may ask of this server. Limits are in tokens."""
    engine, template, options = context.engine, context.chat_template, context.options
    speculation = engine.stats().speculation
    return {
        "id": context.model_name,
        "object": "model",
        "created": context.created_s,
        "owned_by": "optimc",
        "max_model_len": engine.max_seq_len,
        "max_request_tokens": engine.max_request_tokens,
        "max_prompt_tokens": options.max_prompt_tokens,
        "max_output_tokens": options.max_output_tokens,
        "max_seqs": engine.max_seqs,
        "max_choices": options.max_choices,
        "vocab_size": engine.vocab_size,
        "chat": template is not None,
        "tools": template is not None and template.supports_tools and format_of(template.source) is not None,
        "speculation": [] if speculation is None else sorted(speculation.proposers),
    }
