"""Server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html) over one HTTP response."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from optimc_runtime.server.disconnect import unless_disconnected

DONE = b"data: [DONE]\n\n"

# ASCII only: clients that split lines as Unicode does would cut an event at U+2028 or U+0085 in its text.
_encode = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode


def event(data: dict[str, Any]) -> bytes:
    """Return one event holding a JSON object."""
    return b"data: " + _encode(data).encode() + b"\n\n"


class ChoiceEvents:
    """Events that say the same, `head`, but for the one choice each holds: the head is worded once."""

    def __init__(self, head: dict[str, Any]) -> None:
        self._before = event({**head, "choices": []}).removesuffix(b"]}\n\n")

    def event(self, choice: dict[str, Any]) -> bytes:
        """Return the event that holds `choice`."""
        return b"%b%b]}\n\n" % (self._before, _encode(choice).encode())


class EventStream(Response):
    """Sends events as they come; stops as soon as the client is gone. `on_close` is called exactly once, at the end."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], *, on_close: Callable[[], None]) -> None:
        # The last header tells reverse proxies not to gather events.
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._on_close = on_close

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the events end or the client leaves."""
        try:
            await unless_disconnected(receive, self._send_all(send))
        except ClientDisconnect:
            return
        finally:
            self._on_close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for data in self._events:
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
