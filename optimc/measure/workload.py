"""What a benchmark run asks for: the one description of a load, whoever measures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from optimc.errors import ConfigError, Fault
from optimc.measure.load.slo import Slo

Arrival = Literal["closed", "poisson", "constant", "trace"]
"""When requests are sent: as earlier ones end, at random moments, at even ones, or as a trace says."""

DatasetKind = Literal["random", "file", "turns", "trace"]
"""Where prompts come from."""


MOST_REQUESTS = 10**6
MOST_TOKENS = 10**7
MOST_AT_ONCE = 10**5
"""Clients, and turns of a conversation. Beyond these limits a number is a slip of the hand, which would show as a load
generator out of memory, or as one that never sends."""

_RATE_RULE = "at least 0.000001 and at most 10,000"


def _is_rate(rate: float) -> bool:
    return 1e-6 <= rate <= 1e4


@dataclass(frozen=True, slots=True)
class Workload:
    """A closed loop: `concurrency` clients, each sending its next request when the last one has ended; or, with any
    other `arrival`, an open one: requests are sent at their moments, however many are still running.

    Raises ConfigError with all faults at once.
    """

    prompt_tokens: int = 512
    output_tokens: int = 128
    concurrency: int = 1
    requests: int | None = None
    """Requests that are measured; None means max(8, 4 * concurrency), in an open loop max(60, 20 s of load)."""
    warmup_requests: int | None = None
    """Requests sent before those that count, the same shapes: one alone (the cold start, reported apart), the others
    spread over the clients. None means max(3, 1 + concurrency), in an open loop max(10, 2 s of load)."""
    seed: int = 0
    """Fixes the prompts except for their first block, which is new in every run."""
    prompts: str | None = None
    """Name of the file that prompts come from, whatever their lengths; None: random ids, `prompt_tokens` of them."""
    temperature: float = 0.0
    """0 is greedy; above it requests are sampled, each with its number as seed."""
    ignore_eos: bool = True
    """Go on past end-of-sequence tokens, so that every request makes exactly `output_tokens`."""
    same_prompts: bool = False
    """Send one prompt again and again: measures the prefix cache, not prefill."""
    shared_prefix_tokens: int = 0
    """Leading tokens that all prompts have in common."""
    timeout_s: float = 600.0
    """A request that takes longer has failed."""
    max_failure_rate: float = 0.0
    """Largest share of failed requests with which the result still counts as good."""
    arrival: Arrival = "closed"
    rate_per_s: float | None = None
    """Requests per second, for poisson and constant arrivals."""
    rate_scale: float = 1.0
    """A trace is sent this many times as fast as it was recorded."""
    dataset: DatasetKind = "random"
    dataset_digest: str | None = None
    """SHA-256 of the file's bytes, in hex: what was sent, wherever the file lay."""
    prompt_spread: float = 0.0
    """Lengths of random prompts are even in prompt_tokens * (1 - spread) .. (1 + spread); 0: all the same."""
    output_spread: float = 0.0
    """The same for outputs."""
    turns: int = 1
    """User turns of each conversation, with dataset "turns"."""
    turn_tokens: int = 64
    """New tokens of each user turn but the first, which has `prompt_tokens`."""
    slo: Slo | None = None
    """Limits that a request must keep to count as good."""
    duration_s: float | None = None
    """Seconds of an open loop, instead of a number of requests."""

    def __post_init__(self) -> None:
        rules = [
            ("prompt_tokens", 1 <= self.prompt_tokens <= MOST_TOKENS, f"at least 1 and at most {MOST_TOKENS:,}"),
            ("output_tokens", 1 <= self.output_tokens <= MOST_TOKENS, f"at least 1 and at most {MOST_TOKENS:,}"),
            ("concurrency", 1 <= self.concurrency <= MOST_AT_ONCE, f"at least 1 and at most {MOST_AT_ONCE:,}"),
            (
                "requests",
                self.requests is None or self._min_requests <= self.requests <= MOST_REQUESTS,
                self._requests_rule,
            ),
            (
                "warmup_requests",
                self.warmup_requests is None or 0 <= self.warmup_requests <= MOST_REQUESTS,
                f"at least 0 and at most {MOST_REQUESTS:,}",
            ),
            ("seed", self.seed >= 0, "at least 0"),
            ("temperature", 0 <= self.temperature <= 100, "between 0 and 100"),
            (
                "shared_prefix_tokens",
                0 <= self.shared_prefix_tokens < max(1, self.prompt_tokens),
                "at least 0 and less than prompt_tokens",
            ),
            ("timeout_s", 0 < self.timeout_s < math.inf, "above 0"),
            ("max_failure_rate", 0 <= self.max_failure_rate <= 1, "between 0 and 1"),
            ("arrival", self.arrival in get_args(Arrival), f"one of {', '.join(get_args(Arrival))}"),
            ("rate_per_s", self.rate_per_s is None or _is_rate(self.rate_per_s), _RATE_RULE),
            ("rate_scale", _is_rate(self.rate_scale), _RATE_RULE),
            ("dataset", self.dataset in get_args(DatasetKind), f"one of {', '.join(get_args(DatasetKind))}"),
            ("prompt_spread", 0 <= self.prompt_spread <= 1, "between 0 and 1"),
            ("output_spread", 0 <= self.output_spread <= 1, "between 0 and 1"),
            ("turns", 1 <= self.turns <= MOST_AT_ONCE, f"at least 1 and at most {MOST_AT_ONCE:,}"),
            ("turn_tokens", 1 <= self.turn_tokens <= MOST_TOKENS, f"at least 1 and at most {MOST_TOKENS:,}"),
            ("duration_s", self.duration_s is None or 0 < self.duration_s < math.inf, "above 0"),
        ]
        faults = [Fault(name, f"must be {rule}, got {getattr(self, name)}") for name, ok, rule in rules if not ok]
        if self.prompts is not None and (self.same_prompts or self.shared_prefix_tokens):
            faults.append(Fault("prompts", "are sent as the file has them, not with same_prompts or a shared prefix"))
        faults.extend(self._contradictions())
        if faults:
            raise ConfigError("benchmark options", faults)

    def _contradictions(self) -> list[Fault]:
        """Return what does not go together."""
        has_rate = self.arrival in ("poisson", "constant")
        rules = [
            ("rate_per_s", not has_rate or self.rate_per_s is not None, f"is needed for {self.arrival} arrivals"),
            ("rate_per_s", has_rate or self.rate_per_s is None, f"has no meaning for {self.arrival} arrivals"),
            ("rate_scale", self.arrival == "trace" or self.rate_scale == 1, "only speeds up a trace"),
            ("concurrency", not self.is_open or self.concurrency == 1, "is not limited in an open loop; leave it at 1"),
            ("duration_s", has_rate or self.duration_s is None, "needs poisson or constant arrivals"),
            (
                "duration_s",
                self.requests is None or self.duration_s is None,
                "and requests both say how long; give one",
            ),
            ("arrival", self.arrival != "trace" or self.dataset == "trace", "trace needs a dataset with arrival times"),
            ("turns", self.dataset == "turns" or self.turns == 1, 'above 1 need the dataset "turns"'),
        ]
        faults = [Fault(name, message) for name, ok, message in rules if not ok]
        rate, duration_s = self.rate_per_s, self.duration_s
        if rate is not None and duration_s is not None and not rate * duration_s <= MOST_REQUESTS:
            faults.append(Fault("duration_s", f"makes {rate * duration_s:,.0f} requests, more than {MOST_REQUESTS:,}"))
        return faults

    @property
    def _min_requests(self) -> int:
        return 1 if self.is_open else max(1, self.concurrency)

    @property
    def _requests_rule(self) -> str:
        least = "at least 1" if self.is_open else "at least 1 and at least the concurrency"
        return f"{least}, and at most {MOST_REQUESTS:,}"

    @property
    def is_open(self) -> bool:
        """Whether requests are sent at given moments, not as others end."""
        return self.arrival != "closed"

    @property
    def num_requests(self) -> int:
        """Requests that are measured. A trace has its own number, which whoever reads it sets as `requests`."""
        if self.requests is not None:
            return self.requests
        if not self.is_open:
            return max(8, 4 * self.concurrency)
        rate = self.rate_per_s or 0.0
        # At least one: a short window at a low rate is still a window.
        return (
            max(1, math.ceil(rate * self.duration_s)) if self.duration_s is not None else max(60, math.ceil(20 * rate))
        )

    @property
    def num_warmup_requests(self) -> int:
        """Requests sent before, the cold one included."""
        if self.warmup_requests is not None:
            return self.warmup_requests
        if not self.is_open:
            return max(3, 1 + self.concurrency)
        return 1 + max(10, math.ceil(2 * (self.rate_per_s or 0.0)))

    def shape(self) -> str:
        """Return the load in a few words: "512+128 tokens, 4.0/s poisson"."""
        prompt = self.prompts or f"{self.prompt_tokens}{_spread(self.prompt_spread)}"
        size = f"{prompt}+{self.output_tokens}{_spread(self.output_spread)} tokens"
        if self.dataset == "turns":
            size += f", {self.turns} turns"
        load = f"concurrency {self.concurrency}" if self.arrival == "closed" else self.rate_text()
        return f"{size}, {load}"

    def rate_text(self) -> str:
        """Return an open loop's rate: "4.0/s poisson"."""
        if self.rate_per_s is None:
            return f"trace x{self.rate_scale:g}"
        # A small rate keeps two digits: 0.05/s must not read 0.1/s.
        rate = f"{self.rate_per_s:.1f}" if self.rate_per_s >= 1 else f"{self.rate_per_s:.2g}"
        return f"{rate}/s {self.arrival}"

    def to_json(self) -> dict[str, Any]:
        """Return all options, defaults resolved; "by_default" names those that nobody stated."""
        unstated = [name for name in ("requests", "warmup_requests") if getattr(self, name) is None]
        counts = {"requests": self.num_requests, "warmup_requests": self.num_warmup_requests}
        return {**asdict(self), **counts, "by_default": unstated}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Workload:
        """Read what `to_json` gave; the result equals the original."""
        fields = {**data, **dict.fromkeys(data.get("by_default", ()))}
        fields.pop("by_default", None)
        if fields.get("slo") is not None:
            fields["slo"] = Slo.from_json(fields["slo"])
        return cls(**fields)


def _spread(share: float) -> str:
    return f"±{share * 100:g}%" if share else ""
