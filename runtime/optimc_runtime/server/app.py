"""The ASGI application: what is served where, and to whom."""

from __future__ import annotations

import time
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from optimc_runtime.server.answering import Answering, Endpoint
from optimc_runtime.server.chat import chat_completions
from optimc_runtime.server.client import EngineClient, PromptTemplate
from optimc_runtime.server.completions import completions
from optimc_runtime.server.context import ServerContext
from optimc_runtime.server.dashboard import dashboard
from optimc_runtime.server.health import live, ready
from optimc_runtime.server.keys import KeyRing
from optimc_runtime.server.metrics import ServerMetrics
from optimc_runtime.server.models import list_models, retrieve_model
from optimc_runtime.server.openapi import openapi
from optimc_runtime.server.options import ServerOptions
from optimc_runtime.server.page.endpoint import page
from optimc_runtime.server.tokenize import detokenize, tokenize


async def _metrics(context: ServerContext, _request: Request) -> Response:
    return Response(context.metrics.render(), media_type=CONTENT_TYPE_LATEST)


ROUTES: tuple[tuple[str, str, Endpoint], ...] = (
    ("POST", "/v1/chat/completions", chat_completions),
    ("POST", "/v1/completions", completions),
    ("POST", "/tokenize", tokenize),
    ("POST", "/detokenize", detokenize),
    ("GET", "/v1/models", list_models),
    ("GET", "/v1/models/{model:path}", retrieve_model),
    ("GET", "/health", live),
    ("GET", "/health/live", live),
    ("GET", "/health/ready", ready),
    ("GET", "/metrics", _metrics),
    ("GET", "/openapi.json", openapi),
    ("GET", "/", page),
    ("GET", "/page/{name}", page),
    ("GET", "/dashboard.json", dashboard),
)
"""Every POST is work: it is refused while the server drains."""

KEYLESS = frozenset({"/health", "/health/live", "/health/ready", "/openapi.json", "/", "/page/{name}"})
"""What says nothing about anybody's use, and what asks for the key itself."""

POLLED = frozenset({"/health", "/health/live", "/health/ready", "/metrics", "/dashboard.json"})
PAGE = frozenset({"/", "/page/{name}", "/dashboard.json"})


def build_app(
    engine: EngineClient,
    *,
    model_name: str,
    chat_template: PromptTemplate | None = None,
    options: ServerOptions | None = None,
    keys: KeyRing | None = None,
) -> Starlette:
    """Return an ASGI application serving a started engine under `model_name`, to holders of `keys` if there are any.

    Without a chat template `/v1/chat/completions` answers 400. The engine stays the caller's to close.
    """
    context = ServerContext(
        engine=engine,
        model_name=model_name,
        chat_template=chat_template,
        options=options or ServerOptions(),
        metrics=ServerMetrics(engine),
        created_s=int(time.time()),
        keys=keys,
    )

    async def refuse(_request: Request, error: Exception) -> Any:
        async def fail(_context: ServerContext, _request: Request) -> Response:
            raise error

        return Answering(context, fail)

    app = Starlette(
        routes=[
            Route(path, _answering(context, method, path, endpoint), methods=[method])
            for method, path, endpoint in ROUTES
            if context.options.show_page or path not in PAGE
        ],
        exception_handlers={HTTPException: refuse},
        middleware=_cors(context.options.cors_origins),
    )
    # A redirect from /v1/models/ would turn a POST's mistake into something that looks like success.
    app.router.redirect_slashes = False
    app.state.context = context
    return app


def _answering(context: ServerContext, method: str, path: str, endpoint: Endpoint) -> Answering:
    return Answering(
        context, endpoint, needs_key=path not in KEYLESS, is_work=method == "POST", is_polled=path in POLLED
    )


def _cors(origins: tuple[str, ...]) -> list[Middleware]:
    """Let pages of these origins call. Never with credentials: keys are headers, which a page must know to send."""
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),  # the official client sends a dozen of its own
            expose_headers=("X-Request-Id", "Retry-After"),
        )
    ]
