"""Reading a request's JSON body: bounded in size and time, and strict about what JSON is."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from optimc.errors import RequestError
from optimc_runtime.server.errors import ApiError

LINGER_S = 30.0
"""How long a refused body is still read and thrown away."""


class BodyTooLargeError(ApiError):
    """413. Answered by `RefuseBody`."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(
            413, f"the request body is larger than this server's limit of {limit_bytes:,} bytes", code="body_too_large"
        )


async def read_json(request: Request, *, limit_bytes: int, timeout_s: float) -> dict[str, Any]:
    """Return the body's JSON object.

    Raises BodyTooLargeError as soon as the declared or received size passes `limit_bytes`, ApiError 408 after
    `timeout_s`, RequestError if the body is no JSON object (RFC 8259: no NaN, no lone surrogates, nesting up to 200).
    """
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared[:20]) > limit_bytes:
        raise BodyTooLargeError(limit_bytes)
    data = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                data += chunk
                if len(data) > limit_bytes:
                    raise BodyTooLargeError(limit_bytes)
    except TimeoutError:
        raise ApiError(408, f"the request body was not complete after {timeout_s:g} s", code="body_timeout") from None
    try:
        value = _parsed(bytes(data))
    except ValueError as error:
        raise RequestError(f"the request body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise RequestError(f"the request body must be a JSON object, got {type(value).__name__}", code="invalid_json")
    return value


def _parsed(data: bytes) -> Any:
    """Return what the JSON says. Raises ValueError.

    Nobody else runs until it is read: millions of small arrays take a third of the time if the garbage collector does
    not go through those that are there each time there are more.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return from_json(data, allow_inf_nan=False)
    finally:
        if was_enabled:
            gc.enable()


class RefuseBody(JSONResponse):
    """The answer to a body we will not keep: sent at once, then the rest of the body is read and dropped.

    Closing a socket with unread data resets it, and the reset overtakes the answer: the client would see
    "connection reset" instead of the 413.
    """

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, linger, finish."""
        headers = [*self.raw_headers, (b"connection", b"close")]
        await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        try:
            async with asyncio.timeout(LINGER_S):
                more_body = True
                while more_body:
                    message: Message = await receive()
                    more_body = message["type"] == "http.request" and message.get("more_body", False)
        except TimeoutError:
            pass  # the client has had its answer; a reset is now its own doing
        await send({"type": "http.response.body", "body": b"", "more_body": False})
