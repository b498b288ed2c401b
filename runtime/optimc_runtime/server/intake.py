"""The first steps of every endpoint that takes a body: body, fields, model name."""

from __future__ import annotations

import logging
from typing import TypeVar

from starlette.requests import Request

from optimc_runtime.server.body import read_json
from optimc_runtime.server.context import ServerContext
from optimc_runtime.server.protocol.parse import Body, parse

logger = logging.getLogger(__name__)

Fields = TypeVar("Fields", bound=Body)


async def take_request(context: ServerContext, request: Request, model: type[Fields]) -> Fields:
    """Return the request's checked fields. Raises RequestError or ApiError saying which is at fault."""
    options = context.options
    body = await read_json(request, limit_bytes=options.max_body_bytes, timeout_s=options.body_timeout_s)
    # Before all else: fields may be unknown just because the request is meant for another model.
    name = body.get("model")
    if isinstance(name, str):
        context.check_model(name)
    return parse(model, body, allow_unknown=options.allow_unknown_fields, on_unknown=_warn)


def _warn(names: list[str]) -> None:
    shown = ", ".join(name[:40] for name in names[:10])
    logger.warning("ignored unknown fields of a request: %s", shown)
