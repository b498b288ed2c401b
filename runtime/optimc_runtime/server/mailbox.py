"""The way from the engine's thread to the event loop."""

from __future__ import annotations

import asyncio
import ctypes
import os
import weakref
from collections import deque
from collections.abc import Callable

from optimc_runtime.request import RequestOutput

Deliver = Callable[[int, RequestOutput], None]


class Mailbox:
    """Brings outputs to the event loop, which is woken once for all that come before it looks.

    Waking must not let go of the interpreter, as `call_soon_threadsafe` does: the loop's thread would take it and the
    engine's thread, in the middle of its step, would wait until an answer is written. So a byte is written to a pipe
    without releasing the lock, and the loop gets its turn when the engine computes.
    """

    def __init__(self) -> None:
        self._posted: deque[tuple[Deliver, int, RequestOutput]] = deque()
        self._woken = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._read_end, self._write_end = os.pipe()
        for end in (self._read_end, self._write_end):
            os.set_blocking(end, False)
            weakref.finalize(self, os.close, end)
        self._write = ctypes.PyDLL(None).write  # PyDLL: the interpreter stays ours during the call
        self._write.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)
        self._write.restype = ctypes.c_ssize_t

    def open(self) -> None:
        """Let outputs be delivered on the running loop; to be called there, before anything is posted."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            loop.add_reader(self._read_end, self._deliver_all)
            self._loop = loop

    def post(self, deliver: Deliver, index: int, output: RequestOutput, *, wake: bool) -> None:
        """Have `deliver(index, output)` called on the loop, in the order of posting: at once with `wake`, else when it
        is next woken. For the engine's thread."""
        self._posted.append((deliver, index, output))
        # Cleared before the loop looks: what is appended while it looks is either seen or wakes it again.
        if wake and not self._woken:
            self._woken = True
            self._write(self._write_end, b"\0", 1)

    def deliver_posted(self) -> None:
        """Deliver now what waits for the next waking. To be called on the loop."""
        while self._posted:
            deliver, index, output = self._posted.popleft()
            deliver(index, output)

    def _deliver_all(self) -> None:
        os.read(self._read_end, 4096)
        self._woken = False
        self.deliver_posted()
