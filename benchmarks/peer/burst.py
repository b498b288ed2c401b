"""What every engine answers to the same question: these prompts at once, so many tokens each; when did they come?"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Figure = Literal["decode", "prefill", "throughput"]
"""What a workload measures, in tokens per second: output of one request after its first token; prompt of one request
until its first token; output of all requests from the first sent to the last ended."""


@dataclass(frozen=True)
class Workload:
    """Prompts of `prompt_tokens` ids, `requests` of them at the same time, each answered with `output_tokens` tokens
    whatever the model says."""

    figure: Figure
    prompt_tokens: int
    output_tokens: int
    requests: int = 1

    def prompts(self, seed: int) -> list[list[int]]:
        """Return prompts no other seed gives: no prefix cache may answer for them."""
        draw = random.Random(f"{seed} {self}")
        # Ids below 32 are control tokens in SmolLM2's vocabulary of 49,152.
        return [[draw.randrange(32, 49_000) for _ in range(self.prompt_tokens)] for _ in range(self.requests)]


@dataclass(frozen=True)
class RequestTimes:
    """One answer; seconds since the first prompt was sent."""

    first_s: float | None
    """When its first token came; None if the engine shows only whole answers."""
    end_s: float
    tokens: int


@dataclass(frozen=True)
class Burst:
    """All answers."""

    requests: tuple[RequestTimes, ...]

    @classmethod
    def from_json(cls, requests: Sequence[dict[str, Any]]) -> Burst:
        return cls(tuple(RequestTimes(**each) for each in requests))

    def check(self, workload: Workload) -> None:
        """Raise ValueError unless every request got all its tokens: an engine that stops early only looks fast."""
        counts = [each.tokens for each in self.requests]
        if counts != [workload.output_tokens] * workload.requests:
            raise ValueError(f"asked for {workload.requests} × {workload.output_tokens} tokens, got {counts}")

    def tokens_per_s(self, workload: Workload) -> float:
        """Return the workload's figure."""
        if workload.figure == "throughput":
            return sum(each.tokens for each in self.requests) / max(each.end_s for each in self.requests)
        (request,) = self.requests
        assert request.first_s is not None
        if workload.figure == "prefill":
            return workload.prompt_tokens / request.first_s
        return (request.tokens - 1) / (request.end_s - request.first_s)
