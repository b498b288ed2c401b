"""`POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from optimc_runtime.server.context import ServerContext
from optimc_runtime.server.errors import ApiError


async def tokenize(_context: ServerContext, _request: Request) -> Response:
    """Return the token ids of a text or a conversation."""
    raise ApiError(404, "not here yet")


async def detokenize(_context: ServerContext, _request: Request) -> Response:
    """Return the text of token ids."""
    raise ApiError(404, "not here yet")
