"""How long a request would wait for its first token, judged by how fast things went lately."""

from __future__ import annotations

MEMORY = 0.95
"""What a step's, or a request's, weight is multiplied by with each one after it."""


class WaitForecast:
    """Two speeds: prompt tokens computed per second of the steps that computed any, and how long requests run."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._running_s: float | None = None

    def prefilled(self, num_tokens: int, seconds: float) -> None:
        """A step has computed `num_tokens` of prompts, whatever else it did, and took `seconds` in all."""
        self._tokens = MEMORY * self._tokens + num_tokens
        self._seconds = MEMORY * self._seconds + seconds

    def ran(self, seconds: float) -> None:
        """A request has ended `seconds` after its first step."""
        self._running_s = seconds if self._running_s is None else seconds + MEMORY * (self._running_s - seconds)

    def prefill_s(self, num_tokens: int) -> float | None:
        """Return how long computing that many prompt tokens takes; None if no prompt was computed yet."""
        return num_tokens * self._seconds / self._tokens if self._tokens else None

    def turnover_s(self, num_requests: int, max_running: int) -> float:
        """Return how long it takes until that many of `max_running` requests that run have ended; 0 if none ever
        has."""
        return num_requests * (self._running_s or 0.0) / max_running

    def first_token_s(
        self, queued_tokens: int, queued_requests: int, prompt_tokens: int, *, could_run: int, max_running: int
    ) -> float | None:
        """Return in how many seconds a prompt of `prompt_tokens` that comes now, behind the others, gets its first
        token, where `could_run` more requests may start at once; None if no prompt was computed yet."""
        own_s = self.prefill_s(prompt_tokens)
        ahead_s = self.prefill_s(queued_tokens)
        if own_s is None or ahead_s is None:
            return None
        turnover_s = self.turnover_s(max(0, queued_requests + 1 - could_run), max_running)
        return max(ahead_s, turnover_s) + own_s  # prompts are computed while others end
