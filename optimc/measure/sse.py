"""Server-sent events, parsed as bytes arrive (WHATWG HTML, section 9.2.6)."""

from __future__ import annotations


class SseParser:
    """Collects the `data` of events. Comments, other fields and incomplete events give nothing."""

    def __init__(self) -> None:
        self._buffer = b""
        self._data: list[str] = []

    def push(self, received: bytes) -> list[str]:
        """Take the bytes of one read; return the data of the events they complete, in order."""
        self._buffer += received
        # A lone CR also ends a line in the specification, but may be half of a CRLF here; no server sends it.
        *lines, self._buffer = self._buffer.split(b"\n")
        events: list[str] = []
        for line in lines:
            text = line.removesuffix(b"\r").decode("utf-8", errors="replace")
            if not text:
                if self._data:
                    events.append("\n".join(self._data))
                self._data = []
                continue
            name, _, value = text.partition(":")
            if name == "data":
                self._data.append(value.removeprefix(" "))
        return events
