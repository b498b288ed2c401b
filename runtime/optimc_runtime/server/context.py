"""What every endpoint of one server shares."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from weakref import WeakSet

from optimc_runtime.server.client import EngineClient, PromptTemplate
from optimc_runtime.server.errors import ApiError
from optimc_runtime.server.keys import KeyRing
from optimc_runtime.server.mailbox import Mailbox
from optimc_runtime.server.metrics import ServerMetrics
from optimc_runtime.server.options import ServerOptions
from optimc_runtime.server.submission import Submission

GRAMMAR_SLOTS = 2
"""Grammars compiled at once: each takes a core, for up to seconds."""


@dataclass(slots=True)
class Phase:
    """Where a server stands between its start and its end."""

    is_draining: bool = False
    """Nothing new is taken; what runs may finish."""
    is_over: bool = False
    """What is not answered yet is given up."""
    active: int = 0
    """Requests for work that are being answered."""
    waits: set[asyncio.Timeout] = field(default_factory=set)
    """How long each of them may take to the first byte of its reply."""


@dataclass(frozen=True, slots=True)
class ServerContext:
    """One engine behind one model name."""

    engine: EngineClient
    model_name: str
    chat_template: PromptTemplate | None
    options: ServerOptions
    metrics: ServerMetrics
    created_s: int
    """Start of the server, seconds since the epoch."""
    mailbox: Mailbox = field(default_factory=Mailbox)
    submissions: WeakSet[Submission] = field(default_factory=WeakSet)
    """What is being answered now, and perhaps what has just been."""
    keys: KeyRing | None = None
    """Who may ask; None: whoever reaches the port."""
    phase: Phase = field(default_factory=Phase)
    grammar_slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(GRAMMAR_SLOTS))

    def begin_drain(self) -> None:
        """Refuse new work from now on."""
        self.phase.is_draining = True
        self.metrics.drain()

    def abort_all(self) -> None:
        """End every request that is being answered; its client is told (503, or an error event in a stream)."""
        for submission in tuple(self.submissions):
            submission.abort()
        # Those whose body, prompt or grammar is still being read have nothing to abort yet.
        self.phase.is_over = True
        for wait in self.phase.waits:
            if not wait.expired():
                wait.reschedule(asyncio.get_running_loop().time())

    def check_model(self, name: str | None) -> None:
        """Raise ApiError 404 unless `name` is the served model; None asks for whatever is served."""
        if name is not None and name != self.model_name:
            raise ApiError(
                404,
                f"the model {name[:80]!r} does not exist; this server has {self.model_name!r}",
                param="model",
                code="model_not_found",
            )
