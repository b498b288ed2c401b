"""What a benchmark run found, as data, as JSON and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from optimc.measure.exchange import TokenSource
from optimc.measure.machine import Machine
from optimc.measure.percentile import MIN_SAMPLES_P99, Distribution
from optimc.measure.speculation_result import SpeculationResult
from optimc.measure.workload import Workload

DEFINITIONS = {
    "ttft_ms": "time to first token: from sending to the first chunk with content or a token, queueing included",
    "tpot_ms": "time per output token: (e2e - ttft) / (tokens - 1) per request; 1-token outputs excluded",
    "itl_ms": "gap between successive chunks of a request, whatever their number of tokens",
    "e2e_ms": "from sending to the end of the answer",
    "queue_ms": "from arrival to the first step that worked on the request; part of ttft; in process only",
    "output_tokens_per_s": "steady state: tokens credited when they came, while all clients were busy",
    "output_tokens_per_s_whole_run": "tokens of good requests over the time from first sent to last ended",
    "prefill_tokens_per_s": "prompt tokens not from the prefix cache over ttft, each summed; concurrency 1 only",
    "p99": f"withheld below {MIN_SAMPLES_P99} samples",
}
"""What each figure means; part of every JSON report and of `optimc bench --help`."""


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Smallest, middle and largest token count of the good requests."""

    low: int
    median: int
    high: int

    @classmethod
    def of(cls, counts: Sequence[int]) -> TokenRange | None:
        """Summarize the counts; None without any."""
        ordered = sorted(counts)
        return cls(ordered[0], ordered[len(ordered) // 2], ordered[-1]) if ordered else None

    def __str__(self) -> str:
        return f"{self.low}" if self.low == self.high else f"{self.low} / {self.median} / {self.high}"


@dataclass(frozen=True, slots=True)
class BenchResult:
    """One benchmark run. Latencies come from good requests only; throughput counts only their tokens."""

    description: str
    config: Workload
    machine: Machine
    requests: int
    failures: dict[str, int]
    """Reason to count."""
    ttft_ms: Distribution
    tpot_ms: Distribution
    itl_ms: Distribution
    e2e_ms: Distribution
    queue_ms: Distribution
    cold_ttft_ms: float | None
    """Of the very first request."""
    output_tokens_per_s: float | None
    output_tokens_per_s_whole_run: float | None
    requests_per_s: float
    """Good requests over the whole run's time: goodput."""
    prefill_tokens_per_s: float | None
    prefix_hit_rate: float | None
    """Share of prompt tokens from the prefix cache; None when the server does not say."""
    prompt_tokens: TokenRange | None
    """As the server counted them."""
    output_tokens: TokenRange | None
    token_source: TokenSource
    """The weakest source any good request's count came from."""
    wall_s: float
    warnings: tuple[str, ...]
    speculation: SpeculationResult | None = None
    """What guessing ahead gained; None without it."""

    @property
    def num_failures(self) -> int:
        """Measured requests that failed."""
        return sum(self.failures.values())

    @property
    def ok(self) -> bool:
        """Whether no more requests failed than the configuration allows."""
        return self.num_failures <= self.config.max_failure_rate * self.requests

    def to_json(self) -> dict[str, Any]:
        """Return every figure, latencies in milliseconds."""
        return {
            "requests": self.requests,
            "failures": self.num_failures,
            "failure_reasons": self.failures,
            "ok": self.ok,
            "ttft_ms": self.ttft_ms.to_json(),
            "tpot_ms": self.tpot_ms.to_json(),
            "itl_ms": self.itl_ms.to_json(),
            "e2e_ms": self.e2e_ms.to_json(),
            "queue_ms": self.queue_ms.to_json(),
            "cold_ttft_ms": self.cold_ttft_ms,
            "output_tokens_per_s": self.output_tokens_per_s,
            "output_tokens_per_s_whole_run": self.output_tokens_per_s_whole_run,
            "requests_per_s": self.requests_per_s,
            "prefill_tokens_per_s": self.prefill_tokens_per_s,
            "prefix_hit_rate": self.prefix_hit_rate,
            "prompt_tokens": _range_json(self.prompt_tokens),
            "output_tokens": _range_json(self.output_tokens),
            "token_source": self.token_source,
            "wall_s": self.wall_s,
            "speculation": None if self.speculation is None else self.speculation.to_json(),
            "warnings": list(self.warnings),
            "measured": self.description,
            "config": self.config.to_json(),
            "machine": self.machine.to_json(),
            "definitions": DEFINITIONS,
        }

    def table(self) -> RenderableType:
        """Return the report for a terminal: failures first, then latencies, rates, warnings."""
        explained = Text("what each figure means: optimc bench --help", style="dim")
        return Group(self._headline(), self._latencies(), *self._rates(), *self._warning_lines(), explained)

    def _headline(self) -> Text:
        config = self.config
        prompt = f"{config.prompt_tokens} prompt" if config.prompts is None else f"prompts of {config.prompts}"
        shape = f"{prompt} + {config.output_tokens} output tokens, concurrency {config.concurrency}"
        text = Text(f"{self.description}: {shape}\n")
        good = self.requests - self.num_failures
        outcome = f"{self.num_failures} of {self.requests} requests failed, {good} good ({self.requests_per_s:.3g}/s)"
        text.append(outcome, style="bold red" if self.failures else "green")
        for reason, count in self.failures.items():
            text.append(f"\n  {count} × {reason}", style="red")
        return text

    def _latencies(self) -> Table:
        table = Table("ms", "p50", "p90", "p99", "n")
        rows = [("TTFT", self.ttft_ms), ("TPOT", self.tpot_ms), ("ITL", self.itl_ms), ("E2E", self.e2e_ms)]
        if self.queue_ms.n:
            rows.append(("queue", self.queue_ms))
        for name, distribution in rows:
            table.add_row(name, *distribution.cells(",.2f"))
        return table

    def _rates(self) -> list[Text]:
        shown = [
            ("output tokens/s", _rate(self.output_tokens_per_s, "no steady state")),
            ("  over the whole run", _rate(self.output_tokens_per_s_whole_run, "n/a")),
            ("prefill tokens/s", _rate(self.prefill_tokens_per_s, "n/a: measured at concurrency 1 only")),
            (
                "cold start TTFT",
                "n/a" if self.cold_ttft_ms is None else f"{self.cold_ttft_ms:,.1f} ms (not counted above)",
            ),
            (
                "prefix-cache hits",
                "unknown" if self.prefix_hit_rate is None else f"{self.prefix_hit_rate:.1%} of prompt tokens",
            ),
            ("prompt tokens", f"{self.prompt_tokens or 'unknown'}"),
            ("output tokens", f"{self.output_tokens or 'unknown'} (counted by: {self.token_source})"),
            *(self.speculation.lines() if self.speculation is not None else ()),
            ("machine", str(self.machine)),
        ]
        return [Text(f"{name:<22}{value}") for name, value in shown]

    def _warning_lines(self) -> list[Text]:
        return [Text(f"warning: {warning}", style="yellow") for warning in self.warnings]


def _rate(value: float | None, otherwise: str) -> str:
    return otherwise if value is None else f"{value:,.1f}"


def _range_json(tokens: TokenRange | None) -> dict[str, int] | None:
    return None if tokens is None else {"low": tokens.low, "median": tokens.median, "high": tokens.high}
