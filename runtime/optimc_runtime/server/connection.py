"""HTTP/1.1 connections that may not stay open without asking anything, or without reading what they asked for."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 60.0


class DeadlineProtocol(H11Protocol):
    """Closes a connection whose request headers are not complete in time, and one whose client takes nothing of a reply
    for too long, so that slow senders and slow readers cannot hoard sockets and answers.

    uvicorn itself limits only the idle time between requests.
    """

    header_timeout_s = HEADER_TIMEOUT_S
    read_timeout_s = READ_TIMEOUT_S
    _deadline: asyncio.TimerHandle | None = None
    _reading_deadline: asyncio.TimerHandle | None = None
    _unread_bytes = 0
    """What waited to be sent when that clock was last set."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn narrows it so
        """Start the clock."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Take bytes; the clock stops when they complete a request, and starts when they begin another."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clocks."""
        super().connection_lost(exc)
        self._stop()
        self._stop_reading_clock()

    def pause_writing(self) -> None:
        """Start a clock: the client reads more slowly than we write, or not at all."""
        super().pause_writing()
        if self._reading_deadline is None:
            self._set_reading_clock()

    def resume_writing(self) -> None:
        """Stop that clock: most of what was buffered is gone."""
        super().resume_writing()
        self._stop_reading_clock()

    def _watch(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self.header_timeout_s, self._expire)

    def _stop(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _set_reading_clock(self) -> None:
        self._unread_bytes = self.transport.get_write_buffer_size()
        self._reading_deadline = self.loop.call_later(self.read_timeout_s, self._expire_reading)

    def _expire_reading(self) -> None:
        # While writing is paused nothing is added: whoever reads, however slowly, makes it less.
        if self.transport.get_write_buffer_size() < self._unread_bytes:
            self._set_reading_clock()
        else:
            self.transport.abort()  # not closed: that would wait for what is buffered to be read

    def _stop_reading_clock(self) -> None:
        if self._reading_deadline is not None:
            self._reading_deadline.cancel()
            self._reading_deadline = None

    def _expire(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
