"""What surrounds every endpoint: a request id, the key, the drain, the deadline, an answer to every exception, and one
line in the log."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from optimc.errors import OptimcError
from optimc_runtime.server.body import BodyTooLargeError, RefuseBody
from optimc_runtime.server.context import ServerContext
from optimc_runtime.server.errors import AbortedError, ApiError, as_api_error, request_timeout
from optimc_runtime.server.request_log import log_request
from optimc_runtime.server.request_record import RequestRecord

logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499
"""What proxies log for a client that left; nobody receives it."""

MAX_PATH_CHARS = 200
"""Of a path in the log: a client may send 64 KiB of it."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")

Endpoint = Callable[[ServerContext, Request], Awaitable[Response]]


class Answering:
    """An endpoint as an ASGI application. `request.state` has `request_id`, `tenant`, `record` and `deadline_s` (the
    loop's time) by the time the endpoint runs.

    Not a middleware: nothing here is paid per chunk of a stream. `is_work` is refused while the server drains, and
    waited for; `is_polled` is asked every few seconds, so its lines are for debugging.
    """

    def __init__(
        self,
        context: ServerContext,
        endpoint: Endpoint,
        *,
        needs_key: bool = False,
        is_work: bool = False,
        is_polled: bool = False,
    ) -> None:
        self._context = context
        self._endpoint = endpoint
        self._needs_key = needs_key
        self._is_work = is_work
        self._level = logging.DEBUG if is_polled else logging.INFO

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, to its last byte."""
        request = Request(scope, receive, send)
        record = _record(request)
        status = CLIENT_CLOSED_REQUEST
        self._context.phase.active += self._is_work
        try:
            response = await self._respond(request, record)
            status = response.status_code
            response.headers["X-Request-Id"] = record.request_id
            await response(scope, receive, send)
        finally:
            self._context.phase.active -= self._is_work
            self._context.metrics.count_response(status)
            log_request(record, status, level=self._level)
            if self._context.options.traffic_log is not None:
                self._context.options.traffic_log.record(record)

    async def _respond(self, request: Request, record: RequestRecord) -> Response:
        deadline_s = asyncio.get_running_loop().time() + self._context.options.request_timeout_s
        request.state.request_id = record.request_id
        request.state.record = record
        request.state.deadline_s = deadline_s
        timeout = asyncio.timeout_at(deadline_s)
        try:
            self._admit(request, record)
            async with timeout:
                self._context.phase.waits.add(timeout)
                return await self._endpoint(self._context, request)
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except Exception as error:
            if isinstance(error, TimeoutError) and timeout.expired():
                return self._refuse(self._too_late(), record)
            if not isinstance(error, ApiError | OptimcError | HTTPException):
                # Not left to the layers above: they close the connection, and with it the client's next request.
                logger.exception("%s %r failed", record.method, record.path)
            return self._refuse(error, record)
        finally:
            self._context.phase.waits.discard(timeout)

    def _too_late(self) -> Exception:
        if self._context.phase.is_over:
            return AbortedError("the request was aborted before it was answered; the server is shutting down")
        return request_timeout(self._context.options.request_timeout_s)

    def _admit(self, request: Request, record: RequestRecord) -> None:
        """Raise ApiError 401 or 503 for who may not ask, or not any more: before the body is read."""
        keys = self._context.keys
        if self._needs_key and keys is not None:
            authorization = request.headers.get("authorization")
            name = keys.name_of(authorization)
            if name is None:
                raise _unauthorized(is_missing=authorization is None)
            record.tenant = name
        request.state.tenant = record.tenant
        if self._is_work and self._context.phase.is_draining:
            raise ApiError(
                503,
                "this server is shutting down and takes no new requests",
                kind="server_error",
                code="draining",
                # The next attempt needs a new connection: perhaps to another server behind the same name.
                headers={"Retry-After": "1", "Connection": "close"},
            )

    def _refuse(self, error: Exception, record: RequestRecord) -> Response:
        api_error = as_api_error(error)
        record.failed(api_error.code)
        if api_error.status == 429:
            self._context.metrics.count_outcome("overloaded")
        elif api_error.status < 500:
            self._context.metrics.count_outcome("invalid")
        response = RefuseBody if isinstance(error, BodyTooLargeError) else JSONResponse
        return response(api_error.body(), status_code=api_error.status, headers=api_error.headers)


def _record(request: Request) -> RequestRecord:
    wanted = request.headers.get("x-request-id", "")
    return RequestRecord(
        # A client's own id is kept if it can stand in a log and a header as it is.
        request_id=wanted if _REQUEST_ID.fullmatch(wanted) else uuid.uuid4().hex,
        method=request.method,
        path=request.url.path[:MAX_PATH_CHARS],
        tenant="",
        arrived_s=time.monotonic(),
    )


def _unauthorized(*, is_missing: bool) -> ApiError:
    message = (
        "this server wants an API key: send the header 'Authorization: Bearer KEY'"
        if is_missing
        else "the API key is not one of this server's; send 'Authorization: Bearer KEY'"
    )
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
