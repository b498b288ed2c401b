"""What a benchmark run found, as data, as JSON and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from optimc.measure.exchange import TokenSource
from optimc.measure.load.goodput import Goodput
from optimc.measure.load.interval import Interval
from optimc.measure.load.resources import Resources
from optimc.measure.machine import Machine
from optimc.measure.percentile import MIN_SAMPLES_P99, Distribution
from optimc.measure.speculation_result import SpeculationResult
from optimc.measure.workload import Workload

if TYPE_CHECKING:
    from optimc.measure.roofline.row_bound import RowBound

DEFINITIONS = {
    "open loop": "ttft and e2e start when a request was due, not when it was sent",
    "ttft_ms": "time to first token: from sending to the first chunk with content or a token, queueing included",
    "tpot_ms": "time per output token: (e2e - ttft) / (tokens - 1) per request; 1-token outputs excluded",
    "itl_ms": "gap between successive chunks of a request, whatever their number of tokens",
    "e2e_ms": "from sending to the end of the answer",
    "queue_ms": "from arrival to the first step that worked on the request; part of ttft; in process only",
    "output_tokens_per_s": "steady state: tokens credited when they came, while all clients were busy",
    "output_tokens_per_s_whole_run": "tokens of good requests over the time from first sent to last ended",
    "prefill_tokens_per_s": "prompt tokens not from the prefix cache over ttft, each summed; concurrency 1 only",
    "goodput": "requests that succeeded within every limit of --slo; failed ones are in the total",
    "p99": f"withheld below {MIN_SAMPLES_P99} samples",
    "95%": "interval of the value before it: over runs, or by bootstrap (p99: order statistics) within the only one",
}
"""What each figure means; part of every JSON report and of `optimc bench --help`."""

DISTRIBUTIONS = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms", "queue_ms", "lag_ms")
"""Fields of a BenchResult that are distributions."""

NO_SAMPLES = Distribution.of([])


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
    """Good requests over the whole run's time, whatever limits they kept."""
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
    goodput: Goodput | None = None
    """None without limits."""
    intervals: Mapping[str, Interval] = field(default_factory=dict)
    """By figure: "ttft_ms.p50" and the like, and with several runs "output_tokens_per_s"."""
    resources: Resources | None = None
    in_flight_end: int = 0
    """Open loop: requests still running when the window closed."""
    in_flight_thirds: tuple[float, float, float] | None = None
    """Open loop: mean number of requests running, in each third of the window."""
    lag_ms: Distribution = NO_SAMPLES
    """Open loop: from when a request was due to when it was sent."""
    not_sent: int = 0
    """Turns that were not sent, as one before them failed."""
    bound: RowBound | None = None
    """How far the machine would let it go; None where nobody asked."""
    runs: int = 1
    """Above 1: values are medians over runs, each run by itself."""

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
            "format": 1,
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
            "runs": self.runs,
            "goodput": None if self.goodput is None else self.goodput.to_json(),
            "intervals": {name: interval.to_json() for name, interval in self.intervals.items()},
            "resources": None if self.resources is None else self.resources.to_json(),
            "in_flight_end": self.in_flight_end,
            "in_flight_thirds": None if self.in_flight_thirds is None else list(self.in_flight_thirds),
            "lag_ms": self.lag_ms.to_json(),
            "not_sent": self.not_sent,
            "bound": None if self.bound is None else self.bound.to_json(),
            "speculation": None if self.speculation is None else self.speculation.to_json(),
            "warnings": list(self.warnings),
            "measured": self.description,
            "config": self.config.to_json(),
            "machine": self.machine.to_json(),
            "definitions": DEFINITIONS,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> BenchResult:
        """Read what `to_json` gave; the result equals the original."""
        from optimc.measure.roofline.row_bound import RowBound

        distributions: dict[str, Any] = {name: Distribution(**data[name]) for name in DISTRIBUTIONS}
        thirds, goodput, resources = data["in_flight_thirds"], data["goodput"], data["resources"]
        return cls(
            description=data["measured"],
            config=Workload.from_json(data["config"]),
            machine=Machine.from_json(data["machine"]),
            failures=dict(data["failure_reasons"]),
            prompt_tokens=None if data["prompt_tokens"] is None else TokenRange(**data["prompt_tokens"]),
            output_tokens=None if data["output_tokens"] is None else TokenRange(**data["output_tokens"]),
            warnings=tuple(data["warnings"]),
            speculation=None if data["speculation"] is None else SpeculationResult.from_json(data["speculation"]),
            goodput=None if goodput is None else Goodput.from_json(goodput),
            intervals={name: Interval.from_json(interval) for name, interval in data["intervals"].items()},
            resources=None if resources is None else Resources.from_json(resources),
            in_flight_thirds=None if thirds is None else (thirds[0], thirds[1], thirds[2]),
            bound=None if data["bound"] is None else RowBound.from_json(data["bound"]),
            **distributions,
            **{name: data[name] for name in _PLAIN},
        )

    def table(self) -> RenderableType:
        """Return the report for a terminal: failures first, then goodput, latencies, rates, resources, warnings."""
        explained = Text("what each figure means: optimc bench --help", style="dim")
        return Group(
            self._headline(),
            self._latencies(),
            *self._interval_lines(),
            *self._rates(),
            *self._warning_lines(),
            explained,
        )

    def _headline(self) -> Text:
        config = self.config
        load = f"concurrency {config.concurrency}" if config.arrival == "closed" else config.rate_text()
        shape = f"{config.prompt_tokens} prompt + {config.output_tokens} output tokens, {load}"
        if config.prompts is not None:
            # Lines have lengths of their own: what was asked for all of them is not what was made.
            shape = f"prompts of {config.prompts}, {self.output_tokens or 'no'} output tokens, {load}"
        if config.dataset == "turns":
            shape += f", conversations of {config.turns} turns"
        if self.runs > 1:
            shape += f", {self.runs} runs"
        text = Text(f"{self.description}: {shape}\n")
        good = self.requests - self.num_failures
        outcome = f"{self.num_failures} of {self.requests} requests failed, {good} good ({self.requests_per_s:.3g}/s)"
        text.append(outcome, style="bold red" if self.failures else "green")
        for reason, count in self.failures.items():
            text.append(f"\n  {count} × {reason}", style="red")
        if self.goodput is not None:
            style = "green" if self.goodput.met == self.goodput.of else "yellow"
            text.append(f"\ngoodput: {self.goodput} [{config.slo}]", style=style)
        return text

    def _latencies(self) -> Table:
        names = {"TTFT": "ttft_ms", "TPOT": "tpot_ms", "ITL": "itl_ms", "E2E": "e2e_ms"}
        if self.queue_ms.n:
            names["queue"] = "queue_ms"
        has_intervals = any(f"{name}.p50" in self.intervals for name in names.values())
        table = Table("ms", "p50", *(["95%"] if has_intervals else []), "p90", "p99", "n")
        for shown, name in names.items():
            distribution: Distribution = getattr(self, name)
            p50, *others = distribution.cells(",.2f")
            interval = self.intervals.get(f"{name}.p50")
            between = "" if interval is None else f"{interval.low:,.2f} .. {interval.high:,.2f}"
            table.add_row(shown, p50, *([between] if has_intervals else []), *others)
        return table

    def _interval_lines(self) -> list[Text]:
        """Say what the intervals of the table rest on: without it they would promise too much."""
        if not self.intervals:
            return []
        return [Text(self._interval_note(), style="dim")]

    def _interval_note(self) -> str:
        interval = next(iter(self.intervals.values()))
        if self.runs > 1:
            return f"values: medians of {self.runs} runs; 95%: between runs (n={interval.n}, t)"
        tail = self.intervals.get("ttft_ms.p99")
        p99 = "" if tail is None else f"; TTFT p99 {tail.low:,.2f} .. {tail.high:,.2f} (n={tail.n}, order)"
        return f"95% of p50: within this run (n={interval.n}, {interval.method}); says nothing about the next one{p99}"

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
            *self._load_lines(),
            *([("% of bound", str(self.bound))] if self.bound is not None else []),
            ("machine", str(self.machine)),
        ]
        return [Text(f"{name:<22}{value}") for name, value in shown]

    def _load_lines(self) -> list[tuple[str, str]]:
        lines = []
        if self.in_flight_thirds is not None:
            first, _, last = self.in_flight_thirds
            running = f"{first:.1f} on average in the first third of the window, {last:.1f} in the last"
            lines.append(("requests running", f"{running}; {self.in_flight_end} at its end"))
        if self.resources is not None:
            lines.append(("processor, memory", str(self.resources)))
        return lines

    def _warning_lines(self) -> list[Text]:
        return [Text(f"warning: {warning}", style="yellow") for warning in self.warnings]


def _rate(value: float | None, otherwise: str) -> str:
    return otherwise if value is None else f"{value:,.1f}"


def _range_json(tokens: TokenRange | None) -> dict[str, int] | None:
    return None if tokens is None else {"low": tokens.low, "median": tokens.median, "high": tokens.high}


_PLAIN = (
    *("requests", "cold_ttft_ms", "output_tokens_per_s", "output_tokens_per_s_whole_run", "requests_per_s"),
    *("prefill_tokens_per_s", "prefix_hit_rate", "token_source", "wall_s", "in_flight_end", "not_sent", "runs"),
)
"""Fields that are in JSON as they are."""
