"""Failures as the OpenAI API words them: always JSON `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException

from optimc.errors import EngineError, OptimcError, OverloadedError, RequestError

MAX_MESSAGE_CHARS = 1000
"""Messages quote the client's values; a megabyte of stop string need not be sent back."""


class ApiError(Exception):
    """An HTTP-level refusal: status line and error object in one."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status = status
        self.message = message if len(message) <= MAX_MESSAGE_CHARS else message[:MAX_MESSAGE_CHARS] + " ..."
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        super().__init__(self.message)

    def body(self) -> dict[str, Any]:
        """Return the JSON object of the error."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def request_timeout(timeout_s: float) -> ApiError:
    """Return the 504 of a request that took longer than it may."""
    return ApiError(
        504, f"the request was not answered within {timeout_s:g} s", kind="server_error", code="request_timeout"
    )


class AbortedError(EngineError):
    """The engine ended a request that nobody cancelled, as it does when it is shut down."""


def as_api_error(error: Exception) -> ApiError:
    """Return the HTTP meaning of `error`. Anything that is not ours says only "internal error": it may hold secrets."""
    match error:
        case ApiError():
            return error
        case RequestError():
            return ApiError(400, str(error), param=error.param, code=error.code)
        case OverloadedError():
            # The header holds whole seconds, and 0 would invite an immediate retry.
            wait = {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
            return ApiError(429, str(error), kind="rate_limit_error", code="overloaded", headers=wait)
        case AbortedError():
            return ApiError(503, str(error), kind="server_error", code="aborted")
        case EngineError():
            return ApiError(500, str(error), kind="server_error", code="engine_error")
        case OptimcError():
            return ApiError(500, str(error), kind="server_error", code="internal_error")
        case HTTPException():
            kind = "invalid_request_error" if error.status_code < 500 else "server_error"
            return ApiError(error.status_code, error.detail, kind=kind, headers=error.headers)
        case _:
            return ApiError(500, "internal error; the server's log has it", kind="server_error", code="internal_error")
