"""`GET /openapi.json`: what this server serves, as an OpenAPI 3.1 document."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from optimc_runtime.server.context import ServerContext
from optimc_runtime.server.errors import ApiError


async def openapi(_context: ServerContext, _request: Request) -> Response:
    """Return the document."""
    raise ApiError(404, "not here yet")
