"""What Prometheus scrapes (https://prometheus.io/docs/practices/naming): base units, one registry per server."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from optimc_runtime.request import RequestOutput
from optimc_runtime.server.client import EngineClient
from optimc_runtime.stats import SpeculationStats

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
SECONDS_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)


class ServerMetrics:
    """Counts what one server does. Choices are counted one by one: a request with n=3 finishes three times."""

    def __init__(self, engine: EngineClient) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineFigures(engine))
        self._requests = Counter(
            "optimc_requests",
            "Choices by how they ended (stop, length, abort, error), and HTTP requests that were refused before any "
            "work (invalid, overloaded).",
            ["outcome"],
            registry=self._registry,
        )
        for outcome in ("stop", "length", "abort", "error", "invalid", "overloaded"):
            self._requests.labels(outcome)
        self._first_token_s = self._histogram(
            "optimc_time_to_first_token_seconds", "From arrival to the first token, queueing included.", SECONDS
        )
        self._per_token_s = self._histogram(
            "optimc_time_per_output_token_seconds",
            "Mean time between the output tokens of one choice, the first excluded.",
            SECONDS_PER_TOKEN,
        )
        self._total_s = self._histogram("optimc_request_duration_seconds", "From arrival to the last token.", SECONDS)
        self._queue_s = self._histogram("optimc_queue_time_seconds", "From arrival to the first step.", SECONDS)

    def count_outcome(self, outcome: str) -> None:
        """Count one end that has no timings: an abort or a refusal."""
        self._requests.labels(outcome).inc()

    def finish(self, output: RequestOutput) -> None:
        """Record the last output of a choice."""
        assert output.finish_reason is not None, "only a finished choice has an outcome"
        self.count_outcome(output.finish_reason)
        times = output.timings
        if times.scheduled_s is not None:
            self._queue_s.observe(times.scheduled_s - times.arrival_s)
        if times.first_token_s is None or times.finished_s is None:
            return
        self._first_token_s.observe(times.first_token_s - times.arrival_s)
        self._total_s.observe(times.finished_s - times.arrival_s)
        if output.usage.output_tokens > 1:
            decoding_s = times.finished_s - times.first_token_s
            self._per_token_s.observe(decoding_s / (output.usage.output_tokens - 1))

    def render(self) -> bytes:
        """Return the text exposition format."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, description: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, description, buckets=buckets, registry=self._registry)


class _EngineFigures(Collector):
    """Reads the engine when scraped, so that what is published is never older than the scrape."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine

    def describe(self) -> Iterable[Metric]:
        """Say nothing in advance: registering must not touch the engine."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Yield one snapshot of the engine."""
        stats = self._engine.stats()
        yield GaugeMetricFamily("optimc_requests_running", "Requests that take part in steps.", stats.running)
        yield GaugeMetricFamily("optimc_requests_waiting", "Requests queued or preempted.", stats.waiting)
        yield GaugeMetricFamily("optimc_kv_usage_ratio", "Share of KV blocks held by running requests.", stats.kv_usage)
        yield GaugeMetricFamily("optimc_kv_blocks", "KV blocks in the pool.", stats.blocks_total)
        yield GaugeMetricFamily(
            "optimc_kv_cached_blocks", "KV blocks that only the prefix cache still wants.", stats.blocks_cached
        )
        yield GaugeMetricFamily("optimc_last_step_seconds", "Wall time of the last step.", stats.last_step_s)
        for name, description, value in (
            ("optimc_prompt_tokens", "Prompt tokens computed or found cached.", stats.prompt_tokens),
            ("optimc_output_tokens", "Tokens generated.", stats.output_tokens),
            (
                "optimc_prefix_cache_queried_tokens",
                "Prompt tokens looked up in the prefix cache.",
                stats.prefix_queried_tokens,
            ),
            ("optimc_prefix_cache_hit_tokens", "Prompt tokens found in the prefix cache.", stats.prefix_hit_tokens),
            ("optimc_preemptions", "Requests put back for want of KV blocks.", stats.preemptions),
            ("optimc_steps", "Steps of the engine.", stats.steps),
            ("optimc_failed_steps", "Steps that failed, with their requests.", stats.failed_steps),
        ):
            yield CounterMetricFamily(name, description, value)
        phases = CounterMetricFamily("optimc_step_seconds", "Time spent in the steps' phases.", labels=["phase"])
        for phase in ("schedule", "draft", "execute", "sample", "commit"):
            if phase != "draft" or stats.speculation is not None:
                phases.add_metric([phase], getattr(stats, f"{phase}_s"))
        yield phases
        if stats.speculation is not None:
            yield from _speculation_figures(stats.speculation)


def _speculation_figures(stats: SpeculationStats) -> Iterable[Metric]:
    for name, description, figure in (
        ("drafted_tokens", "Guessed tokens that were verified.", "drafted"),
        ("accepted_tokens", "Guessed tokens that became output.", "accepted"),
        ("trees", "Guesses verified, of one or more tokens each.", "trees"),
    ):
        family = CounterMetricFamily(f"optimc_speculation_{name}", description, labels=["proposer"])
        for proposer, figures in stats.proposers.items():
            family.add_metric([proposer], getattr(figures, figure))
        yield family
    for name, description, counts in (
        ("position_drafted", "Guesses tried at this distance.", stats.position_drafted),
        ("position_accepted", "Guesses that became output at this distance.", stats.position_accepted),
    ):
        family = CounterMetricFamily(f"optimc_speculation_{name}", description, labels=["position"])
        for position, count in enumerate(counts, 1):
            family.add_metric([str(position)], count)
        yield family
    for name, description, value in (
        ("sequence_steps", "Decoding sequences times steps, those without guesses included.", stats.sequence_steps),
        ("emitted_tokens", "Tokens those steps put out.", stats.emitted),
    ):
        yield CounterMetricFamily(f"optimc_speculation_{name}", description, value)
    yield GaugeMetricFamily(
        "optimc_speculation_active", "1 while guesses are made, 0 while they would not pay.", float(stats.is_active)
    )
