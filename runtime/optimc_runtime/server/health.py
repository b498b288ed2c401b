"""`GET /health/live` and `/health/ready`: alive means the engine moves, not that a socket answers."""

from __future__ import annotations

import math

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from optimc_runtime.server.context import ServerContext


async def live(context: ServerContext, _request: Request) -> Response:
    """Answer 200 while the engine makes progress or is idle, 503 when it has work and stands still, or broke."""
    return _stalled(context) or JSONResponse({"status": "ok"})


async def ready(context: ServerContext, _request: Request) -> Response:
    """Answer 200 while new requests are welcome: 503 when the engine stands still and while the server drains.

    There is no "not yet": the port opens after the warm-up.
    """
    if context.phase.is_draining:
        return _unavailable("draining", "the server is shutting down; running requests may finish")
    return _stalled(context) or JSONResponse({"status": "ok"})


def _stalled(context: ServerContext) -> Response | None:
    threshold_s, stalled_s = context.options.stall_threshold_s, context.engine.stalled_s()
    if threshold_s < stalled_s < math.inf:
        return _unavailable(
            "stalled",
            f"the engine has work but made no step for {stalled_s:.1f} s; more than {threshold_s:g} s is no progress",
        )
    # How long it stalls was looked at once: asked again, an engine that moves on just now would pass for a broken one.
    if not context.engine.is_healthy(math.inf):
        return _unavailable("broken", "the engine takes no requests any more; the log says why")
    return None


def _unavailable(status: str, detail: str) -> Response:
    return JSONResponse({"status": status, "detail": detail}, status_code=503)
