"""How an engine is run: the options of one process, checked against the plan it serves."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from optimc.errors import ConfigError, Fault
from optimc.plan import Manifest
from optimc_runtime.executor.base import KvPoolInfo
from optimc_runtime.policy import PolicyName


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What no step and no request may exceed: the plan's limits, narrowed by the options and the pool."""

    max_seq_len: int
    """Longest sequence in tokens, prompt plus output."""
    max_step_tokens: int
    """Most tokens T in one step."""
    max_seqs: int
    """Most sequences B in one step."""
    block_size: int
    """Slots S per block."""
    num_blocks: int
    """Blocks P in the pool."""
    pinned_blocks: int = 0
    """Those of them that hold pinned prefixes for good."""

    @property
    def max_running(self) -> int:
        """Sequences that may run at once: each must be able to decode in every step."""
        return min(self.max_seqs, self.max_step_tokens)

    @property
    def max_request_tokens(self) -> int:
        """Longest sequence that can run at all: alone, beside nothing but pinned prefixes."""
        return min(self.max_seq_len, (self.num_blocks - self.pinned_blocks) * self.block_size)


def _is_int(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


MOST_NODES = 256
"""Guesses for one sequence that a step may have: who sees whom is a square of them."""

SpeculationMode = Literal["off", "auto", "medusa", "ngram", "draft"]
"""Who proposes tokens: the plan's Medusa heads, n-grams of the text itself, another plan; auto: heads and n-grams."""


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """How tokens are guessed and verified. Raises ConfigError listing every fault."""

    mode: SpeculationMode = "off"
    draft_plan: Path | None = None
    """The plan that drafts; given if and only if mode is "draft"."""
    max_nodes: int = 32
    """Most guesses for one sequence in one step, up to MOST_NODES."""
    ngram_min: int = 2
    """Shortest repetition, in tokens, that n-grams copy from."""
    ngram_max: int = 8
    """Longest run of tokens that is looked up."""
    acceptance: Literal["exact", "typical"] = "exact"
    """"typical" also takes guesses that are merely likely (2401.10774): the text differs from plain sampling's."""
    epsilon: float = 0.09
    """Typical acceptance: a guess at least this likely is taken."""
    delta: float = 0.3
    """Typical acceptance: the threshold is at most delta * exp(-entropy)."""
    always: bool = False
    """Verify the whole proposal, whatever it costs: for measuring and tests."""

    def __post_init__(self) -> None:
        faults = []
        if self.mode not in get_args(SpeculationMode):
            known = ", ".join(get_args(SpeculationMode))
            faults.append(Fault("mode", f"must be one of {known}, got {self.mode!r}"))
        elif (self.mode == "draft") != (self.draft_plan is not None):
            faults.append(Fault("draft_plan", "must be given with mode draft, and with no other"))
        for name in ("max_nodes", "ngram_min", "ngram_max"):
            if not _is_int(getattr(self, name), 1):
                faults.append(Fault(name, f"must be an integer of at least 1, got {getattr(self, name)!r}"))
        if not faults and self.max_nodes > MOST_NODES:
            faults.append(Fault("max_nodes", f"must be at most {MOST_NODES}, got {self.max_nodes}"))
        if not faults and self.ngram_max < self.ngram_min:
            faults.append(Fault("ngram_max", f"must be at least ngram_min {self.ngram_min}, got {self.ngram_max}"))
        if self.acceptance not in ("exact", "typical"):
            faults.append(Fault("acceptance", f"must be exact or typical, got {self.acceptance!r}"))
        for name in ("epsilon", "delta"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and 0 < value <= 1):
                faults.append(Fault(name, f"must be above 0 and at most 1, got {value!r}"))
        if not isinstance(self.always, bool):
            faults.append(Fault("always", f"must be true or false, got {self.always!r}"))
        if faults:
            raise ConfigError("speculation", faults)

    @classmethod
    def parse(cls, text: str) -> SpeculationOptions:
        """Read "auto", "medusa", "ngram", "draft=PLAN" or "off". Raises ConfigError for anything else."""
        mode, equals, path = text.partition("=")
        if mode == "draft" and path:
            return cls("draft", Path(path))
        if equals or mode == "draft" or mode not in get_args(SpeculationMode):
            fault = Fault("speculation", f"must be auto, medusa, ngram, draft=PLAN or off, got {text!r}")
            raise ConfigError("options", [fault])
        return cls(mode)  # type: ignore[arg-type]  # one of the modes, as just checked


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Options of `optimc serve`. None means: as the plan says. Raises ConfigError listing every fault."""

    max_seqs: int | None = None
    """Most sequences in one step."""
    max_step_tokens: int | None = None
    """Most tokens in one step."""
    max_seq_len: int | None = None
    """Longest sequence in tokens, prompt plus output."""
    kv_memory_bytes: int | None = None
    """Size of the KV pool."""
    prefix_cache: bool = True
    """Reuse the K/V of full blocks between requests that begin alike."""
    chunked_prefill: bool = True
    """Split prompts over steps. Off: a prompt runs whole in one step, before all that decode if it does not fit beside
    them (they wait for one such step at a time), and must not exceed max_step_tokens."""
    inflight_batching: bool = True
    """Let requests join a running batch. Off: a new batch starts only when the previous one is finished."""
    max_queued_requests: int = 256
    """Requests that may wait beyond those that could run at once; one more is refused (HTTP 429)."""
    max_queued_tokens: int = 1 << 20
    """Prompt tokens that may wait; a request that would exceed it is refused unless nothing waits."""
    max_overtakes: int = 64
    """Younger requests that may pass a waiting one that does not fit, before none may."""
    policy: PolicyName = "fcfs"
    """Which waiting request is admitted first; those of differing tenants take turns under every policy."""
    ageing_s: float = 10.0
    """Policy "priority": waiting this long counts as much as one level of priority."""
    gap_factor: float = 2.0
    """Chunks of prompts are cut so that a step takes at most this many times what it takes without them; 0: as large
    as they fit. Chunks then depend on time, answers do not where the executor's results do not depend on chunks."""
    ttft_slo_s: float | None = None
    """A request whose first token is expected to take longer than this is refused (HTTP 429)."""
    threads: int | None = None
    """Threads of the executor; None lets it choose."""
    speculation: SpeculationOptions = SpeculationOptions()
    """Whether tokens are guessed and verified several at a time."""

    def __post_init__(self) -> None:
        faults = []
        for name in ("max_seqs", "max_step_tokens", "max_seq_len", "kv_memory_bytes", "threads"):
            value = getattr(self, name)
            if value is not None and not _is_int(value, 1):
                faults.append(Fault(name, f"must be an integer of at least 1, got {value!r}"))
        for name in ("max_queued_requests", "max_queued_tokens", "max_overtakes"):
            if not _is_int(getattr(self, name), 0):
                faults.append(Fault(name, f"must be an integer of at least 0, got {getattr(self, name)!r}"))
        if self.policy not in get_args(PolicyName):
            faults.append(Fault("policy", f"must be one of {', '.join(get_args(PolicyName))}, got {self.policy!r}"))
        if not _is_number(self.ageing_s) or self.ageing_s <= 0:
            faults.append(Fault("ageing_s", f"must be a number of seconds above 0, got {self.ageing_s!r}"))
        if not _is_number(self.gap_factor) or not (self.gap_factor == 0 or self.gap_factor > 1):
            faults.append(Fault("gap_factor", f"must be above 1, or 0 for no limit, got {self.gap_factor!r}"))
        if self.ttft_slo_s is not None and not (_is_number(self.ttft_slo_s) and self.ttft_slo_s > 0):
            faults.append(Fault("ttft_slo_s", f"must be a number of seconds above 0, got {self.ttft_slo_s!r}"))
        for name in ("prefix_cache", "chunked_prefill", "inflight_batching"):
            if not isinstance(getattr(self, name), bool):
                faults.append(Fault(name, f"must be true or false, got {getattr(self, name)!r}"))
        if not isinstance(self.speculation, SpeculationOptions):
            faults.append(Fault("speculation", f"must be SpeculationOptions, got {self.speculation!r}"))
        if faults:
            raise ConfigError("engine options", faults)

    def resolve(self, manifest: Manifest, pool: KvPoolInfo) -> StepLimits:
        """Return the limits in force. Raises ConfigError for every option beyond what the plan was built for."""
        built = manifest.limits
        faults = [
            Fault(name, f"{wanted:,} exceeds the {limit:,} the plan was built for; rebuild it with larger limits")
            for name in ("max_seqs", "max_step_tokens", "max_seq_len")
            if (wanted := getattr(self, name)) is not None and wanted > (limit := getattr(built, name))
        ]
        if pool.block_size != manifest.kv.block_size:
            faults.append(
                Fault("kv", f"the executor's blocks have {pool.block_size} slots, the plan's {manifest.kv.block_size}")
            )
        if pool.num_blocks < 1:
            faults.append(
                Fault("kv_memory_bytes", f"holds no block; one takes {pool.bytes_per_block:,} bytes, give more memory")
            )
        if faults:
            raise ConfigError(f"engine options for plan '{manifest.name}'", faults)
        return StepLimits(
            max_seq_len=self.max_seq_len or built.max_seq_len,
            max_step_tokens=self.max_step_tokens or built.max_step_tokens,
            max_seqs=self.max_seqs or built.max_seqs,
            block_size=pool.block_size,
            num_blocks=pool.num_blocks,
        )
