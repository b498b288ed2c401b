"""A sequence as the scheduler sees it: token ids, how many are computed, which blocks hold them."""

from __future__ import annotations

from collections.abc import Sequence as Ids
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from optimc_runtime.block_pool import BlockId
from optimc_runtime.prefix_cache import Extras, PrefixNode
from optimc_runtime.request import RequestId


class Status(Enum):
    """Where a sequence is. A preempted one is WAITING with output."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Sequence:
    """Tokens and blocks of one request. Fields are written by the scheduler; `append` by whoever samples.

    `num_computed` tokens have their K/V in the pool; a step computes from there on. `extras` is None for a sequence
    that neither looks into the prefix cache nor publishes to it. `all_logits` asks for logits at every position, not
    only at the last one.
    """

    __slots__ = (
        "all_logits",
        "arrived_s",
        "blocked_since",
        "blocks",
        "extras",
        "is_follower",
        "lease",
        "max_tokens",
        "num_cached",
        "num_charged",
        "num_computed",
        "num_overtaken",
        "num_preemptions",
        "num_prompt",
        "num_published",
        "num_scored",
        "num_tokens",
        "order",
        "priority",
        "proposer",
        "rank",
        "request_id",
        "row",
        "status",
        "tenant",
        "tokens",
    )

    def __init__(
        self,
        request_id: RequestId,
        order: int,
        prompt: Ids[int] | NDArray[np.int64],
        max_output_tokens: int,
        *,
        extras: Extras | None = None,
        all_logits: bool = False,
    ) -> None:
        self.request_id = request_id
        self.order = order
        """Arrival number: lower is older."""
        self.tokens: NDArray[np.int64] = np.array(prompt, np.int64)
        """[capacity] the first num_tokens are known."""
        self.num_prompt = self.num_tokens = len(self.tokens)
        self.max_tokens = self.num_prompt + max_output_tokens
        self.extras = extras
        self.all_logits = all_logits
        self.proposer: str | None = None
        """Who may guess this sequence's tokens: None = as the engine is set, "off" = nobody."""
        self.tenant = ""
        """On whose behalf it runs: see `FairShare`. "" is nobody in particular."""
        self.is_follower = False
        """See `Terms`."""
        self.priority = 0
        """Lower is sooner: see `policy`."""
        self.arrived_s = 0.0
        """When it was submitted, seconds of `time.monotonic()`."""
        self.rank = (True, 0.0, order)
        """Where it stands among those that wait: see `policy`."""
        self.status = Status.WAITING
        self.num_computed = 0
        self.blocks: list[BlockId] = []
        self.row = -1
        """Row of the scheduler's block table while RUNNING."""
        self.lease: PrefixNode | None = None
        """Where the next full block is published; None if nowhere."""
        self.num_published = 0
        self.num_cached = 0
        """Prompt tokens found in the prefix cache when first admitted."""
        self.num_charged = 0
        """Output tokens its tenant was charged for."""
        self.num_scored = 0
        """With all_logits: positions whose logits were delivered; a preemption does not repeat them."""
        self.num_preemptions = 0
        self.num_overtaken = 0
        """Younger sequences admitted since this one has been waiting and did not fit."""
        self.blocked_since: int | None = None
        """`BlockPool.num_released` when this last did not fit."""

    @property
    def num_output(self) -> int:
        """Tokens sampled so far."""
        return self.num_tokens - self.num_prompt

    @property
    def wants_token(self) -> bool:
        """Whether a token is to be sampled once all known tokens are computed."""
        return self.num_tokens < self.max_tokens

    def append(self, token_id: int) -> None:
        """Add a sampled token; the next step computes it."""
        if self.num_tokens == len(self.tokens):
            capacity = min(self.max_tokens, max(16, 2 * self.num_tokens))
            grown = np.empty(capacity, np.int64)
            grown[: self.num_tokens] = self.tokens
            self.tokens = grown
        self.tokens[self.num_tokens] = token_id
        self.num_tokens += 1

    def output_ids(self) -> tuple[int, ...]:
        """Return the sampled tokens."""
        return tuple(self.tokens[self.num_prompt : self.num_tokens].tolist())
