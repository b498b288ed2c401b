"""`GET /` and `GET /page/{name}`: one static page that chats with the model and shows what the server is doing."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from optimc_runtime.server.context import ServerContext
from optimc_runtime.server.errors import ApiError

MEDIA_TYPES = {"index.html": "text/html", "app.js": "text/javascript", "style.css": "text/css"}
"""All files there are: a name that is not listed is never looked for on disk."""

HEADERS = {
    # Answers are a stranger's text. Should one ever become markup, it may neither run nor call anybody.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


async def page(_context: ServerContext, request: Request) -> Response:
    """Answer one of the page's files; without a name, the page itself. Raises ApiError 404 for any other name."""
    name = request.path_params.get("name", "index.html")
    if name not in MEDIA_TYPES:
        raise ApiError(404, f"the page has no file {name[:80]!r}; it has {', '.join(MEDIA_TYPES)}")
    return Response(_read(name), media_type=MEDIA_TYPES[name], headers=HEADERS)


@cache
def _read(name: str) -> bytes:
    """Read a file once: at the first request, since a server is ready sooner without."""
    return (Path(__file__).parent / name).read_bytes()
