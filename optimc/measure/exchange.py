"""One request as the client saw it: when it was sent, when each chunk came, how it ended.

Times are seconds of the benchmark's clock. TTFT and end-to-end start at the moment of sending, or at the one when the
request should have been sent: a server that stalls must not be excused because the load generator waited with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

TokenSource = Literal["ids", "usage", "estimate"]
"""Where a token count comes from: the ids themselves, the server's usage object, or the number of chunks."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One increment that carried content or a token. Role announcements, empty deltas and comments are none."""

    at_s: float
    tokens: int | None
    """Tokens in it; None when the transport does not say."""


@dataclass(slots=True)
class Exchange:
    """Filled in by a driver while the request runs; read-only once it has ended."""

    sent_s: float
    chunks: list[Chunk] = field(default_factory=list)
    end_s: float | None = None
    """The last chunk, the finish reason or the failure, whichever came last; None while running or when abandoned."""
    prompt_tokens: int | None = None
    """As counted by the server; None when it does not say."""
    cached_tokens: int | None = None
    """Prompt tokens answered by the prefix cache; None when the server does not say."""
    output_tokens: int = 0
    source: TokenSource = "ids"
    queue_s: float | None = None
    """From arrival to the first step that worked on the request, as the engine reports it."""
    failure: str | None = None
    """Why the request does not count, or None."""
    scheduled_s: float | None = None
    """When it should have been sent; None where nobody said when."""
    answer_ids: list[int] = field(default_factory=list)
    """The answer, in process: a conversation goes on from it."""
    answer_texts: list[str] = field(default_factory=list)
    """The answer over HTTP, increment by increment."""

    def fail(self, reason: str, at_s: float) -> None:
        """Record the first reason; later ones are its consequences."""
        if self.failure is None:
            self.failure = reason
            self.end_s = at_s

    @property
    def succeeded(self) -> bool:
        """Whether it ended normally, with the tokens it claims."""
        return self.failure is None and self.end_s is not None

    @property
    def start_s(self) -> float:
        """What latencies count from."""
        return self.sent_s if self.scheduled_s is None else self.scheduled_s

    @property
    def lag_s(self) -> float | None:
        """How late the load generator was; None without a schedule."""
        return None if self.scheduled_s is None else self.sent_s - self.scheduled_s

    @property
    def ttft_s(self) -> float | None:
        """From the start to the first chunk with content or a token."""
        return self.chunks[0].at_s - self.start_s if self.chunks else None

    @property
    def e2e_s(self) -> float | None:
        """From the start to the end."""
        return None if self.end_s is None else self.end_s - self.start_s

    @property
    def tpot_s(self) -> float | None:
        """(E2E - TTFT) / (tokens - 1); None for outputs of fewer than two tokens."""
        if self.ttft_s is None or self.e2e_s is None or self.output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Gaps between successive chunks, one fewer than chunks."""
        return [after.at_s - before.at_s for before, after in pairwise(self.chunks)]

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens that had to be computed."""
        return (self.prompt_tokens or 0) - (self.cached_tokens or 0)
