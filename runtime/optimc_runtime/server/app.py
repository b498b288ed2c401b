"""The ASGI application: routes, and what becomes of errors."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from optimc.errors import OptimcError
from optimc_runtime.server.body import BodyTooLargeError, RefuseBody
from optimc_runtime.server.chat import chat_completions
from optimc_runtime.server.client import EngineClient, PromptTemplate
from optimc_runtime.server.completions import completions
from optimc_runtime.server.context import ServerContext
from optimc_runtime.server.errors import ApiError, as_api_error
from optimc_runtime.server.health import health
from optimc_runtime.server.metrics import ServerMetrics
from optimc_runtime.server.models import list_models, retrieve_model
from optimc_runtime.server.options import ServerOptions

logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499
"""What proxies log for a client that left; nobody receives it."""

Endpoint = Callable[[ServerContext, Request], Awaitable[Response]]


async def _metrics(context: ServerContext, _request: Request) -> Response:
    return Response(context.metrics.render(), media_type=CONTENT_TYPE_LATEST)


ROUTES: tuple[tuple[str, str, Endpoint], ...] = (
    ("POST", "/v1/chat/completions", chat_completions),
    ("POST", "/v1/completions", completions),
    ("GET", "/v1/models", list_models),
    ("GET", "/v1/models/{model:path}", retrieve_model),
    ("GET", "/health", health),
    ("GET", "/metrics", _metrics),
)


def build_app(
    engine: EngineClient,
    *,
    model_name: str,
    chat_template: PromptTemplate | None = None,
    options: ServerOptions | None = None,
) -> Starlette:
    """Return an ASGI application serving a started engine under `model_name`.

    Without a chat template `/v1/chat/completions` answers 400. The engine stays the caller's to close.
    """
    context = ServerContext(
        engine=engine,
        model_name=model_name,
        chat_template=chat_template,
        options=options or ServerOptions(),
        metrics=ServerMetrics(engine),
        created_s=int(time.time()),
    )

    async def refuse(_request: Request, error: Exception) -> Response:
        return _error_response(context, error)

    app = Starlette(
        routes=[Route(path, _answering(context, endpoint), methods=[method]) for method, path, endpoint in ROUTES],
        exception_handlers={HTTPException: refuse},
    )
    # A redirect from /v1/models/ would turn a POST's mistake into something that looks like success.
    app.router.redirect_slashes = False
    app.state.abort_all = context.abort_all
    return app


def _answering(context: ServerContext, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    """Bind an endpoint to its context, and give every exception the answer it deserves."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(context, request)
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except Exception as error:
            if not isinstance(error, ApiError | OptimcError):
                # Not left to the layers above: they close the connection, and with it the client's next request.
                logger.exception("%s %s failed", request.method, request.url.path)
            return _error_response(context, error)

    return answer


def _error_response(context: ServerContext, error: Exception) -> Response:
    api_error = as_api_error(error)
    if api_error.status == 429:
        context.metrics.count_outcome("overloaded")
    elif api_error.status < 500:
        context.metrics.count_outcome("invalid")
    response = RefuseBody if isinstance(error, BodyTooLargeError) else JSONResponse
    return response(api_error.body(), status_code=api_error.status, headers=api_error.headers)
