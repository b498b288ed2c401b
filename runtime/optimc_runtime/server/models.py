"""`GET /v1/models` and `GET /v1/models/{model}`."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from optimc_runtime.server.context import ServerContext


async def list_models(context: ServerContext, _request: Request) -> Response:
    """List the one model there is."""
    return JSONResponse({"object": "list", "data": [_model(context)]})


async def retrieve_model(context: ServerContext, request: Request) -> Response:
    """Describe a model by name."""
    context.check_model(request.path_params["model"])
    return JSONResponse(_model(context))


def _model(context: ServerContext) -> dict[str, Any]:
    return {
        "id": context.model_name,
        "object": "model",
        "created": context.created_s,
        "owned_by": "optimc",
        "max_model_len": context.engine.max_seq_len,
    }
