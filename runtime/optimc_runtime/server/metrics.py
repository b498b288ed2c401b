"""What Prometheus scrapes (https://prometheus.io/docs/practices/naming): base units, one registry per server."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from optimc_runtime.request import RequestOutput
from optimc_runtime.server.client import EngineClient
from optimc_runtime.stats import EngineStats, SpeculationStats

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
        self._prefill_s = self._histogram("optimc_prefill_seconds", "From the first step to the first token.", SECONDS)
        self._responses = Counter(
            "optimc_http_responses",
            "HTTP requests by the status they got; 499: the client left before.",
            ["status"],
            registry=self._registry,
        )
        self._draining = Gauge("optimc_draining", "1 while nothing new is taken.", registry=self._registry)

    def count_response(self, status: int) -> None:
        """Count one HTTP request that is over."""
        self._responses.labels(status).inc()

    def drain(self) -> None:
        """Show that the server takes nothing new any more."""
        self._draining.set(1)

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
        if times.scheduled_s is not None:
            self._prefill_s.observe(times.first_token_s - times.scheduled_s)
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
        for name, description, value in _gauges(stats):
            yield GaugeMetricFamily(name, description, value)
        yield GaugeMetricFamily(
            "optimc_step_stalled_seconds",
            "Since the last step, while there is work; +Inf if the engine broke.",
            self._engine.stalled_s(),
        )
        for name, description, value in _counters(stats):
            yield CounterMetricFamily(name, description, value)
        tenants = CounterMetricFamily("optimc_tenant_tokens", "Tokens by API key.", labels=["tenant", "kind"])
        for tenant, figures in stats.tenants.items():
            tenants.add_metric([tenant, "prompt"], figures.prompt_tokens)
            tenants.add_metric([tenant, "output"], figures.output_tokens)
        yield tenants
        phases = CounterMetricFamily("optimc_step_seconds", "Time spent in the steps' phases.", labels=["phase"])
        for phase in ("schedule", "draft", "execute", "sample", "commit"):
            if phase != "draft" or stats.speculation is not None:
                phases.add_metric([phase], getattr(stats, f"{phase}_s"))
        yield phases
        if stats.speculation is not None:
            yield from _speculation_figures(stats.speculation)


def _gauges(stats: EngineStats) -> tuple[tuple[str, str, float], ...]:
    """Return (name, description, value) of what goes up and down."""
    return (
        ("optimc_requests_running", "Requests that take part in steps.", stats.running),
        ("optimc_requests_waiting", "Requests queued or preempted.", stats.waiting),
        ("optimc_waiting_tokens", "Prompt tokens of the requests that wait.", stats.waiting_tokens),
        ("optimc_kv_usage_ratio", "Share of KV blocks held by running requests.", stats.kv_usage),
        ("optimc_kv_blocks", "KV blocks in the pool.", stats.blocks_total),
        ("optimc_kv_cached_blocks", "KV blocks that only the prefix cache still wants.", stats.blocks_cached),
        ("optimc_prefix_cache_blocks", "KV blocks the prefix cache can serve.", stats.prefix_cached_blocks),
        ("optimc_prefix_cache_pinned_blocks", "KV blocks that are never evicted.", stats.pinned_blocks),
        (
            "optimc_chunk_budget_tokens",
            "Prompt tokens the last step could take beside decoding; 0: no limit.",
            stats.chunk_budget_tokens,
        ),
        ("optimc_last_step_seconds", "Wall time of the last step.", stats.last_step_s),
    )


def _counters(stats: EngineStats) -> tuple[tuple[str, str, float], ...]:
    """Return (name, description, value) of what only goes up."""
    return (
        ("optimc_prompt_tokens", "Prompt tokens computed or found cached.", stats.prompt_tokens),
        ("optimc_output_tokens", "Tokens generated.", stats.output_tokens),
        (
            "optimc_prefix_cache_queried_tokens",
            "Prompt tokens looked up in the prefix cache.",
            stats.prefix_queried_tokens,
        ),
        (
            "optimc_prefix_cache_hit_tokens",
            "Prompt tokens found in the prefix cache: so many were saved computing.",
            stats.prefix_hit_tokens,
        ),
        (
            "optimc_prefix_cache_evicted_blocks",
            "KV blocks the prefix cache gave up for room.",
            stats.prefix_evicted_blocks,
        ),
        ("optimc_preemptions", "Requests put back for want of KV blocks.", stats.preemptions),
        ("optimc_steps", "Steps of the engine.", stats.steps),
        ("optimc_failed_steps", "Steps that failed, with their requests.", stats.failed_steps),
    )


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
