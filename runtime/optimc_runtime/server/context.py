"""What every endpoint of one server shares."""

from __future__ import annotations

from dataclasses import dataclass

from optimc_runtime.server.client import EngineClient, PromptTemplate
from optimc_runtime.server.errors import ApiError
from optimc_runtime.server.metrics import ServerMetrics
from optimc_runtime.server.options import ServerOptions


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

    def check_model(self, name: str | None) -> None:
        """Raise ApiError 404 unless `name` is the served model; None asks for whatever is served."""
        if name is not None and name != self.model_name:
            raise ApiError(
                404,
                f"the model {name[:80]!r} does not exist; this server has {self.model_name!r}",
                param="model",
                code="model_not_found",
            )
