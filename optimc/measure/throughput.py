"""Tokens per second, by two definitions that answer two questions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from optimc.measure.exchange import Exchange
from optimc.measure.load.load_run import LoadRun


def steady_tokens_per_s(run: LoadRun) -> float | None:
    """Output tokens per second while all clients were busy: each token is credited when it came, so requests that
    straddle an edge count with the part inside. None without a good measured request or without duration.

    The window opens when the last client sends its first measured request and closes when the last measured request
    ends. Tokens of failed requests count nowhere.
    """
    good = [exchange for exchange in run.measured if exchange.succeeded]
    if not good:
        return None
    start, end = run.steady_start_s, _last_end(run.measured)
    if end <= start:
        return None
    per_chunk = sum(e.output_tokens for e in good) / sum(len(e.chunks) for e in good)
    everything = [*run.warmup, *run.measured, *run.fillers]
    credited = sum(
        tokens
        for exchange in everything
        if exchange.failure is None
        for at_s, tokens in _credits(exchange, per_chunk)
        if start < at_s <= end
    )
    return credited / (end - start)


def whole_run_tokens_per_s(run: LoadRun) -> float | None:
    """Output tokens of good measured requests over the time from the first one sent to the last one ended."""
    good = [exchange for exchange in run.measured if exchange.succeeded]
    if not good:
        return None
    wall_s = measured_wall_s(run)
    return sum(exchange.output_tokens for exchange in good) / wall_s if wall_s > 0 else None


def measured_wall_s(run: LoadRun) -> float:
    """From the first measured request sent, or due in an open loop, to the last one ended, in seconds."""
    return _last_end(run.measured) - min(exchange.start_s for exchange in run.measured)


def _last_end(exchanges: Sequence[Exchange]) -> float:
    return max(exchange.end_s for exchange in exchanges if exchange.end_s is not None)


def _credits(exchange: Exchange, per_chunk: float) -> Iterator[tuple[float, float]]:
    """Yield when and how many tokens came. A transport that counts only whole requests spreads them over the chunks;
    a cancelled filler, whose count never came, gets the run's average."""
    if exchange.succeeded and exchange.chunks:
        per_chunk = exchange.output_tokens / len(exchange.chunks)
    for chunk in exchange.chunks:
        yield chunk.at_s, per_chunk if chunk.tokens is None else float(chunk.tokens)
