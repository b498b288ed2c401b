"""What an engine has done, and how full it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from optimc_runtime.request import FinishReason


@dataclass(slots=True)
class Counters:
    """Running totals, written by the step loop only."""

    steps: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    failed_steps: int = 0
    last_step_s: float = 0.0
    schedule_s: float = 0.0
    draft_s: float = 0.0
    execute_s: float = 0.0
    sample_s: float = 0.0
    commit_s: float = 0.0
    finished: dict[FinishReason, int] = field(
        default_factory=lambda: {"stop": 0, "length": 0, "abort": 0, "error": 0},
    )


@dataclass(frozen=True, slots=True)
class ProposerStats:
    """Running totals of one proposer."""

    drafted: int
    """Tokens that were verified."""
    accepted: int
    """Those of them that were emitted; the model's own token after them never counts."""
    trees: int
    """Guesses verified, of one or more tokens each."""


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """What guessing ahead has brought."""

    mode: str
    is_active: bool
    """Whether guesses are being made now; they are not while they do not pay."""
    proposers: Mapping[str, ProposerStats]
    position_drafted: tuple[int, ...]
    """By distance 1, 2, ..: how many trees had a token there below what was accepted before it."""
    position_accepted: tuple[int, ...]
    """By distance: how many of those trees' tokens there were emitted."""
    sequence_steps: int
    """Decoding sequences times steps, those without guesses included."""
    emitted: int
    """Tokens those steps emitted."""
    draft_s: float
    """Total time spent making guesses."""

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens a decoding sequence gets from a step."""
        return self.emitted / self.sequence_steps if self.sequence_steps else 0.0


@dataclass(frozen=True, slots=True)
class TenantStats:
    """What one tenant, the holder of an API key, has and had of the engine."""

    running: int
    waiting: int
    """Requests queued or preempted."""
    prompt_tokens: int
    """Of requests admitted so far, those found cached included."""
    output_tokens: int
    """Sampled so far."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot. Each figure is exact; taken while steps run, two figures may be one step apart."""

    running: int
    """Sequences that take part in steps."""
    waiting: int
    """Requests queued or preempted."""
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    """Blocks nobody uses that the prefix cache can still serve."""
    blocks_used: int
    """Blocks of running sequences."""
    steps: int
    failed_steps: int
    prompt_tokens: int
    """Of requests whose prompt is completely computed or found cached."""
    output_tokens: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    preemptions: int
    finished: Mapping[FinishReason, int]
    """Requests by how they ended."""
    last_step_s: float
    """Wall time of the last step."""
    schedule_s: float
    """Total time spent deciding."""
    execute_s: float
    """Total time inside the executor."""
    sample_s: float
    """Total time choosing tokens."""
    commit_s: float
    """Total time on bookkeeping, text and callbacks."""
    draft_s: float = 0.0
    """Total time making guesses."""
    speculation: SpeculationStats | None = None
    """None without speculation."""
    waiting_tokens: int = 0
    """Known tokens of the requests that wait."""
    prefix_cached_blocks: int = 0
    """Blocks the prefix cache can serve, in use or not."""
    prefix_evicted_blocks: int = 0
    """Blocks whose cached content was given up for room."""
    pinned_blocks: int = 0
    """Cached blocks that are never given up."""
    chunk_budget_tokens: int = 0
    """Most prompt tokens that might last be computed beside running requests; 0 while nothing limits them."""
    refused: int = 0
    """Requests refused because too much was waiting."""
    tenants: Mapping[str, TenantStats] = field(default_factory=dict)
    """By name; requests on nobody's behalf are not in it."""

    @property
    def kv_usage(self) -> float:
        """Share of the pool's blocks in use, 0 to 1."""
        return self.blocks_used / self.blocks_total

    @property
    def prefix_hit_rate(self) -> float:
        """Share of looked-up prompt tokens that were cached, 0 to 1."""
        return self.prefix_hit_tokens / self.prefix_queried_tokens if self.prefix_queried_tokens else 0.0

    @property
    def overhead_share(self) -> float:
        """Share of the steps' time spent outside the executor, 0 to 1: Python's share."""
        outside_s = self.schedule_s + self.draft_s + self.sample_s + self.commit_s
        total_s = outside_s + self.execute_s
        return outside_s / total_s if total_s else 0.0
