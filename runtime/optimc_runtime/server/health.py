"""`GET /health`: alive means the engine moves, not that a socket answers."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from optimc_runtime.server.context import ServerContext


async def health(context: ServerContext, _request: Request) -> Response:
    """Answer 200 while the engine makes progress or is idle, 503 when it has work and stands still."""
    threshold_s = context.options.stall_threshold_s
    if context.engine.is_healthy(threshold_s):
        return JSONResponse({"status": "ok"})
    return JSONResponse(
        {"status": "stalled", "detail": f"the engine has work but made no step for {threshold_s:g} s"}, status_code=503
    )
