"""What a plan says about its Medusa heads: their form, how well they guess, and the tree their guesses make.

Letters: K heads, d hidden size, V' draft vocabulary. Head k guesses the token k + 1 places after the root, which is the
token sampled from the hidden state the heads read.
"""

from __future__ import annotations

import itertools
import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

_MOST_ROWS = 1 << 20
"""Of any step: recipes allow no more."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class HeadAccuracy(_Section):
    """How often one head is right on one kind of text."""

    head: int = Field(ge=0)
    kind: str
    """"chat", "prose", "all", ..."""
    top: tuple[float, ...]
    """[k] share of positions whose token is among the first 1..k guesses, of those whose parents were right."""
    tokens: int = Field(ge=0)
    """Positions it was measured on."""
    quantized: bool
    """Whether the heads were as they are stored; False: before rounding."""


class HeadInfo(_Section):
    """One head."""

    confidence: tuple[tuple[float, float], ...]
    """Knots (log-probability of a guess, probability that it is accepted if its parents are), both rising."""

    @model_validator(mode="after")
    def _rises(self) -> HeadInfo:
        points = [point for knot in self.confidence for point in knot]
        if not all(map(math.isfinite, points)) or not all(0 <= share <= 1 for _, share in self.confidence):
            raise ValueError("confidence has knots that are no finite numbers and probabilities")
        if any(
            after < before for pair in itertools.pairwise(self.confidence) for before, after in zip(*pair, strict=True)
        ):
            raise ValueError("confidence falls between two knots")
        return self


class DraftTreeInfo(_Section):
    """The guesses that a step may verify at most."""

    nodes: tuple[tuple[int, ...], ...]
    """Paths of ranks from the root: (0,) is head 0's likeliest token, (0, 1) head 1's second likeliest after it.
    Parents before children."""
    source: Literal["auto", "chain", "given"]
    expected_tokens: float | None
    """Tokens per step that the measured accuracies promise; None if none were measured."""
    costs: tuple[tuple[int, float], ...]
    """(rows, seconds) of a step for one sequence, measured when the plan was built; empty if it was not."""
    machine: str
    """Where the costs were measured."""

    @model_validator(mode="after")
    def _is_tree(self) -> DraftTreeInfo:
        known: set[tuple[int, ...]] = {()}
        for node in self.nodes:
            if not node or min(node) < 0 or node[:-1] not in known or node in known:
                raise ValueError(f"node {list(node)} stands before its parent, twice, or has a rank below 0")
            known.add(node)
        return self

    @model_validator(mode="after")
    def _costs_rise_by_rows(self) -> DraftTreeInfo:
        rows = [count for count, _ in self.costs]
        if rows != sorted(set(rows)) or not all(1 <= count <= _MOST_ROWS for count in rows):
            raise ValueError(f"costs are not listed by rising numbers of rows, 1 to {_MOST_ROWS}")
        if not all(0 < seconds < math.inf for _, seconds in self.costs):
            raise ValueError("costs are no finite numbers above 0")
        return self


class HeadsInfo(_Section):
    """All heads of a plan."""

    num_heads: int = Field(gt=0)
    """K."""
    hidden_size: int = Field(gt=0)
    """d."""
    num_blocks: int = Field(gt=0)
    """Residual blocks of each head."""
    conditioned: bool
    """Whether the first block also reads the embedding of the root token."""
    projection: Literal["shared", "own"]
    """Whether heads use the model's output head or have one each."""
    draft_vocab_size: int = Field(gt=0)
    """V'."""
    draft_vocab: str | None
    """Plan tensor, I32 [V']: token ids, ascending. None: the whole vocabulary."""
    bits: int | None
    """Of the heads' weights; None: floating point."""
    base_hash: str
    """Digest of the checkpoint the heads were trained on; empty if unknown."""
    heads: tuple[HeadInfo, ...]
    """[K]"""
    accuracies: tuple[HeadAccuracy, ...] = ()
    tree: DraftTreeInfo

    @model_validator(mode="after")
    def _agrees(self) -> HeadsInfo:
        if len(self.heads) != self.num_heads:
            raise ValueError(f"{len(self.heads)} heads described, {self.num_heads} declared")
        deepest = max((len(node) for node in self.tree.nodes), default=0)
        if deepest > self.num_heads:
            raise ValueError(f"a tree of depth {deepest} over {self.num_heads} heads")
        if any(max(node) >= self.draft_vocab_size for node in self.tree.nodes):
            raise ValueError(f"a tree of more siblings than the {self.draft_vocab_size} tokens of the draft vocabulary")
        return self


class HeadsReport(_Section):
    """How heads came to be."""

    source: Literal["trained", "imported"]
    tokens: dict[str, int]
    """Tokens trained on, by kind of text."""
    heldout_tokens: dict[str, int]
    """Tokens kept for measuring, by kind of text."""
    seconds: dict[str, float]
    """Of "sample", "train" and "measure"."""
    epochs: float
    stopped_because: str
    resumed_at_step: int | None
    history: tuple[tuple[int, float], ...]
    """(training tokens seen, held-out share of right first guesses of the first head)."""
    accuracies: tuple[HeadAccuracy, ...]
    """Before and after rounding."""
