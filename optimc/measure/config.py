"""What a benchmark run asks for."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from optimc.errors import ConfigError, Fault


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """A closed loop: `concurrency` clients, each sending its next request when the last one has ended.

    Raises ConfigError with all faults at once.
    """

    prompt_tokens: int = 512
    output_tokens: int = 128
    concurrency: int = 1
    requests: int | None = None
    """Requests that are measured; None means max(8, 4 * concurrency)."""
    warmup_requests: int | None = None
    """Requests sent before those that count, the same shapes: one alone (the cold start, reported apart), the others
    spread over the clients. None means max(3, 1 + concurrency)."""
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

    def __post_init__(self) -> None:
        rules = [
            ("prompt_tokens", self.prompt_tokens >= 1, "at least 1"),
            ("output_tokens", self.output_tokens >= 1, "at least 1"),
            ("concurrency", self.concurrency >= 1, "at least 1"),
            (
                "requests",
                self.requests is None or self.requests >= max(1, self.concurrency),
                "at least 1 and at least the concurrency",
            ),
            ("warmup_requests", self.warmup_requests is None or self.warmup_requests >= 0, "at least 0"),
            ("seed", self.seed >= 0, "at least 0"),
            ("temperature", 0 <= self.temperature <= 100, "between 0 and 100"),
            (
                "shared_prefix_tokens",
                0 <= self.shared_prefix_tokens < max(1, self.prompt_tokens),
                "at least 0 and less than prompt_tokens",
            ),
            ("timeout_s", self.timeout_s > 0, "above 0"),
            ("max_failure_rate", 0 <= self.max_failure_rate <= 1, "between 0 and 1"),
        ]
        faults = [Fault(name, f"must be {rule}, got {getattr(self, name)}") for name, ok, rule in rules if not ok]
        if self.prompts is not None and (self.same_prompts or self.shared_prefix_tokens):
            faults.append(Fault("prompts", "are sent as the file has them, not with same_prompts or a shared prefix"))
        if faults:
            raise ConfigError("benchmark options", faults)

    @property
    def num_requests(self) -> int:
        """Requests that are measured."""
        return max(8, 4 * self.concurrency) if self.requests is None else self.requests

    @property
    def num_warmup_requests(self) -> int:
        """Requests sent before, the cold one included."""
        return max(3, 1 + self.concurrency) if self.warmup_requests is None else self.warmup_requests

    def to_json(self) -> dict[str, object]:
        """Return all options, defaults resolved."""
        return {**asdict(self), "requests": self.num_requests, "warmup_requests": self.num_warmup_requests}
