"""Under which load a factor can show what it does; where it cannot, that is said before anything is measured."""

from __future__ import annotations

from dataclasses import dataclass

from optimc.measure.attribution.config import AttributeConfig
from optimc.measure.workload import Workload
from optimc.recipe import LimitsSpec

SPREAD = 0.5
"""Of output lengths, where batches of equal length would hide that requests may leave one early."""
RANDOM_GUESSES = "prompts are random ids: what is guessed of such answers says little about real ones"


@dataclass(frozen=True, slots=True)
class FactorLoads:
    """The workloads of one factor, or why there is none."""

    workloads: tuple[Workload, ...] = ()
    na: str | None = None
    note: str = ""


def load_name(workload: Workload) -> str:
    """Return the load in a few words; two loads of one attribution never share them."""
    shared = workload.shared_prefix_tokens
    return workload.shape() + (f", {shared} shared" if shared else "")


def loads_of(factor: str, config: AttributeConfig, limits: LimitsSpec) -> FactorLoads:
    """Return the loads that show a factor: all, but for features of the runtime that need a certain one."""
    match factor:
        case "inflight_batching":
            return _inflight_loads(config, limits)
        case "chunked_prefill":
            return _chunked_loads(config, limits)
        case "prefix_cache":
            return _prefix_loads(config, limits)
    note = RANDOM_GUESSES if factor.endswith("speculation") else ""
    return FactorLoads(config.workloads(), note=note)


def _inflight_loads(config: AttributeConfig, limits: LimitsSpec) -> FactorLoads:
    clients = config.concurrencies[-1]
    if clients == 1:
        return FactorLoads(na="one client never waits for a batch; give a concurrency above 1")
    shortest, longest = (round(config.output_tokens * (1 + change)) for change in (-SPREAD, SPREAD))
    most = limits.max_seq_len
    if most is not None and config.prompt_tokens + longest > most:
        return FactorLoads(
            na=f"it takes uneven answers, and {config.prompt_tokens} prompt + {longest} output tokens exceed "
            f"limits.max_seq_len {most}; ask for fewer"
        )
    note = f"outputs of {max(1, shortest)} to {longest} tokens"
    return FactorLoads((config.workload(clients, output_spread=SPREAD),), note=note)


def _chunked_loads(config: AttributeConfig, limits: LimitsSpec) -> FactorLoads:
    prompt, step = config.prompt_tokens, limits.max_step_tokens
    if prompt > step:
        return FactorLoads(
            na=f"without it the engine refuses prompts longer than a step: {prompt} tokens, max_step_tokens is {step}"
        )
    showing = [clients for clients in config.concurrencies if clients * prompt > step]
    if not showing:
        return FactorLoads(
            na=f"nothing is cut: {config.concurrencies[-1]} × {prompt} prompt tokens fit in one step of {step}"
        )
    return FactorLoads(tuple(config.workload(clients) for clients in showing))


def _prefix_loads(config: AttributeConfig, limits: LimitsSpec) -> FactorLoads:
    shared = config.prompt_tokens // 2
    if shared < limits.block_size:
        return FactorLoads(na=f"half of the prompt, {shared} tokens, fills no block of {limits.block_size}")
    note = f"{shared} of {config.prompt_tokens} prompt tokens shared by all requests"
    return FactorLoads((config.workload(config.concurrencies[0], shared_prefix_tokens=shared),), note=note)
