"""What every endpoint of one server shares."""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import WeakSet

from optimc_runtime.server.client import EngineClient, PromptTemplate
from optimc_runtime.server.errors import ApiError
from optimc_runtime.server.mailbox import Mailbox
from optimc_runtime.server.metrics import ServerMetrics
from optimc_runtime.server.options import ServerOptions
from optimc_runtime.server.submission import Submission


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

    def abort_all(self) -> None:
        """End every request that is being answered; its client is told (503, or an error event in a stream)."""
        for submission in tuple(self.submissions):
            submission.abort()

    def check_model(self, name: str | None) -> None:
        """Raise ApiError 404 unless `name` is the served model; None asks for whatever is served."""
        if name is not None and name != self.model_name:
            raise ApiError(
                404,
                f"the model {name[:80]!r} does not exist; this server has {self.model_name!r}",
                param="model",
                code="model_not_found",
            )
