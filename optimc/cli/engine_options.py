"""From command-line options to a running engine, the same way for serve, chat, bench and eval."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from optimc.cli.options import bytes_option, faults_by_option
from optimc.errors import ConfigError, Fault
from optimc.plan import Plan
from optimc_runtime.config import EngineConfig, SpeculationOptions
from optimc_runtime.engine import Engine
from optimc_runtime.policy import PolicyName


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
    policy: PolicyName | None = None,
    ageing_s: float | None = None,
    gap_factor: float = 0.0,
    ttft_slo_ms: float | None = None,
    speculation: SpeculationOptions | None = None,
    trust: bool = False,
) -> Engine:
    """Load a plan, opened or to be opened, and start its engine. Raises PlanError or ConfigError in words.

    With speculation, the engine first takes a moment to measure its steps. Chunks of prompts are cut for nobody unless
    `gap_factor` says so: where nobody reads along, what is computed must not depend on time.
    """
    cores = os.cpu_count() or 1
    if threads is not None and threads > cores:
        # They would spin against each other: so much slower that it looks like a server that hangs.
        raise ConfigError("options", [Fault("--threads", f"{threads} exceeds this machine's {cores} cores")])
    if ttft_slo_ms is not None and not 0 < ttft_slo_ms < math.inf:
        fault = Fault("--slo-ttft-ms", f"must be a number of milliseconds above 0, got {ttft_slo_ms:g}")
        raise ConfigError("options", [fault])
    given: dict[str, Any] = {
        "max_seqs": max_seqs,
        "max_step_tokens": max_step_tokens,
        "kv_memory_bytes": bytes_option(kv_memory, "--kv-memory"),
        "threads": threads,
        "max_queued_requests": max_queued_requests,
        "max_queued_tokens": max_queued_tokens,
        "policy": policy,
        "ageing_s": ageing_s,
        "ttft_slo_s": None if ttft_slo_ms is None else ttft_slo_ms / 1000,
    }
    with faults_by_option(kv_memory_bytes="--kv-memory", ageing_s="--ageing", gap_factor="--max-gap-factor"):
        config = EngineConfig(
            prefix_cache=prefix_cache,
            chunked_prefill=chunked_prefill,
            inflight_batching=inflight_batching,
            gap_factor=gap_factor,
            speculation=SpeculationOptions() if speculation is None else speculation,
            **{name: value for name, value in given.items() if value is not None},
        )
    engine = Engine.load(plan, config, trust=trust)
    engine.start()
    if config.speculation.mode != "off":
        try:
            engine.profile_steps()
        except BaseException:
            engine.close()
            raise
    return engine


def speculation_options(
    wanted: str | None,
    *,
    none: bool,
    default: str,
    lossy_acceptance: str | None = None,
    typical_epsilon: float | None = None,
    typical_delta: float | None = None,
) -> SpeculationOptions:
    """Return what `--speculation`, `--no-speculation` and `--lossy-acceptance` ask for together.

    Raises ConfigError if they contradict each other.
    """
    faults = []
    if none and wanted is not None:
        faults.append(Fault("--no-speculation", f"contradicts --speculation {wanted}; give one of them"))
    if lossy_acceptance not in (None, "typical"):
        faults.append(Fault("--lossy-acceptance", f"must be typical, got {lossy_acceptance!r}"))
    given = {"epsilon": typical_epsilon, "delta": typical_delta}
    thresholds: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if lossy_acceptance is None:
        faults += [Fault(f"--typical-{name}", "needs --lossy-acceptance typical") for name in thresholds]
    if faults:
        raise ConfigError("options", faults)
    options = SpeculationOptions.parse("off" if none else default if wanted is None else wanted)
    if lossy_acceptance is None:
        return options
    if options.mode == "off":
        raise ConfigError("options", [Fault("--lossy-acceptance", "needs speculation, which is off")])
    return replace(options, acceptance="typical", **thresholds)


def describe_speculation(engine: Engine) -> str:
    """Return in a few words who guesses tokens, and how they are accepted."""
    stats = engine.stats().speculation
    if stats is None:
        return "off"
    options = engine.config.speculation
    lossy = ", typical acceptance: answers differ from plain sampling's" if options.acceptance == "typical" else ""
    return f"{' and '.join(stats.proposers)}{lossy}"
