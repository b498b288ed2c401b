"""From command-line options to a running engine, the same way for serve, chat, bench and eval."""

from __future__ import annotations

import os
from pathlib import Path

from optimc.cli.options import bytes_option
from optimc.errors import ConfigError, Fault
from optimc.plan import Plan
from optimc_runtime.config import EngineConfig
from optimc_runtime.engine import Engine


def load_engine(
    plan: Plan | Path,
    *,
    max_seqs: int | None = None,
    max_step_tokens: int | None = None,
    kv_memory: str | None = None,
    threads: int | None = None,
    prefix_cache: bool = True,
    chunked_prefill: bool = True,
    inflight_batching: bool = True,
    max_queued_requests: int | None = None,
    max_queued_tokens: int | None = None,
    trust: bool = False,
) -> Engine:
    """Load a plan, opened or to be opened, and start its engine. Raises PlanError or ConfigError in words."""
    cores = os.cpu_count() or 1
    if threads is not None and threads > cores:
        # They would spin against each other: so much slower that it looks like a server that hangs.
        raise ConfigError("options", [Fault("--threads", f"{threads} exceeds this machine's {cores} cores")])
    given = {
        "max_seqs": max_seqs,
        "max_step_tokens": max_step_tokens,
        "kv_memory_bytes": bytes_option(kv_memory, "--kv-memory"),
        "threads": threads,
        "max_queued_requests": max_queued_requests,
        "max_queued_tokens": max_queued_tokens,
    }
    config = EngineConfig(
        prefix_cache=prefix_cache,
        chunked_prefill=chunked_prefill,
        inflight_batching=inflight_batching,
        **{name: value for name, value in given.items() if value is not None},
    )
    engine = Engine.load(plan, config, trust=trust)
    engine.start()
    return engine
