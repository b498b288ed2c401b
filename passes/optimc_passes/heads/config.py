"""What a recipe may say of Medusa heads."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import ConfigDict, Field, model_validator

from optimc_passes.base import PassConfig

MOST_RANKS = 10
"""Guesses of one head that a tree may hang at a node, and that accuracies are measured of."""
MOST_NODES = 64

_CHAIN = re.compile(r"chain:([1-9])\Z")
_WITH_FROM = frozenset({"from_", "bits", "tree"})


class HeadsData(PassConfig):
    """The text that heads are trained on; the model writes it itself, as it will be served."""

    chat_tokens: int = Field(default=400_000, ge=0, le=1 << 28)
    """Tokens of answers in conversations the model makes up, both sides; needs a chat template."""
    prose_tokens: int = Field(default=100_000, ge=0, le=1 << 28)
    """Tokens that continue openings of the calibration text."""
    temperature: float = Field(default=0.7, ge=0, le=2)
    """Of answers and continuations that are drawn."""
    top_p: float = Field(default=0.9, gt=0, le=1)
    """Of answers and continuations."""
    greedy: float = Field(default=0.5, ge=0, le=1)
    """Share of answers and continuations that take the likeliest token each time. Mix what the model will be asked
    for."""
    max_tokens: int = Field(default=256, ge=16, le=1 << 16)
    """Longest answer and continuation."""


class MedusaConfig(PassConfig):
    """How heads are made: trained here, or taken over with `from`."""

    # `from` is no name for a field.
    model_config = ConfigDict(serialize_by_alias=True)

    heads: int = Field(default=3, ge=1, le=8)
    """Heads; head k guesses the token k places after the next one."""
    blocks: int = Field(default=1, ge=1, le=4)
    """Residual blocks of each head."""
    conditioned: bool = True
    """Let heads also read the embedding of the token that has just been sampled: better guesses, twice the first
    matrix."""
    projection: Literal["shared", "own"] = "shared"
    """Whether heads use the model's own output head or train one each."""
    draft_vocab: int | Literal["all"] = 6144
    """Tokens that heads can guess: the most frequent ones of the text they are trained on. Fewer cost less at every
    step."""
    data: HeadsData = HeadsData()
    """The text that heads are trained on."""
    minutes: float = Field(default=18.0, gt=0, le=1 << 16)
    """Most minutes of training; sampling and measuring come on top."""
    epochs: float = Field(default=12.0, gt=0, le=1000)
    """Times the text is gone through, if the minutes suffice."""
    batch_tokens: int = Field(default=512, ge=16, le=1 << 16)
    """Positions of a training step."""
    learning_rate: float = Field(default=3e-3, gt=0, le=1)
    """At its peak; it falls to 0 along a cosine."""
    heldout: float = Field(default=0.05, ge=0.01, le=0.5)
    """Share of conversations and continuations that are not trained on: accuracies are measured on them."""
    bits: Literal[4, 8, 16] = 8
    """Bits of the heads' matrices; 16 leaves them in floating point."""
    tree: str | list[list[int]] = "auto"
    """Guesses verified per step at most. `auto` weighs accuracies against what more rows cost on this machine;
    `chain:N` takes the likeliest token of the first N heads; a list names nodes as ranks by head: [[0], [1], [0, 0]].
    """
    seed: int = Field(default=0, ge=0, le=1 << 32)
    """Of sampling and training."""
    from_: str | None = Field(default=None, alias="from", min_length=1)
    """Folder of Medusa heads to take over instead of training some: `config.json` and `medusa_lm_head.pt` or
    `.safetensors` (relative to the working directory, else to the recipe). Only `bits` and `tree` go with it."""

    @model_validator(mode="after")
    def _agrees(self) -> MedusaConfig:
        faults = [*self._draft_vocab_faults(), *self._from_faults(), *self._data_faults(), *tree_faults(self.tree)]
        if not faults and self.from_ is None and self.depth > self.heads:
            faults.append(f"tree: it is {self.depth} deep and there are {self.heads} heads")
        if faults:
            raise ValueError("; ".join(faults))
        return self

    @property
    def depth(self) -> int:
        """How many heads the tree needs at least; 0 for `auto`."""
        if isinstance(self.tree, str):
            return chain_length(self.tree) or 0
        return max(len(node) for node in self.tree)

    def _draft_vocab_faults(self) -> list[str]:
        if self.draft_vocab == "all" or self.draft_vocab >= 32:
            return []
        return [f"draft_vocab: {self.draft_vocab} tokens are too few to guess from; want at least 32, or all"]

    def _from_faults(self) -> list[str]:
        # By value: recipes write defaults out before passes see them.
        fields = type(self).model_fields.items()
        others = sorted(name for name, field in fields if getattr(self, name) != field.default)
        others = [name for name in others if name not in _WITH_FROM]
        if self.from_ is None or not others:
            return []
        return [f"from: heads are taken over as they are; leave out {', '.join(others)}"]

    def _data_faults(self) -> list[str]:
        if self.data.chat_tokens + self.data.prose_tokens > 0:
            return []
        return ["data: no tokens to train on; set chat_tokens or prose_tokens"]


def chain_length(tree: str) -> int | None:
    """Return N of `chain:N`, None for anything else."""
    found = _CHAIN.match(tree)
    return int(found[1]) if found else None


def tree_faults(tree: str | list[list[int]]) -> list[str]:
    """Return what is wrong with a tree as recipes write it."""
    if isinstance(tree, str):
        if tree == "auto" or chain_length(tree):
            return []
        return [f"tree: '{tree}' is neither auto nor chain:N nor a list of nodes"]
    if not 1 <= len(tree) <= MOST_NODES:
        return [f"tree: {len(tree)} nodes, want 1 to {MOST_NODES}"]
    nodes = [tuple(node) for node in tree]
    faults = []
    for index, node in enumerate(nodes):
        if not node:
            faults.append(f"tree[{index}]: the root is not listed")
        elif any(not 0 <= rank < MOST_RANKS for rank in node):
            faults.append(f"tree[{index}]: ranks are 0 to {MOST_RANKS - 1}, got {list(node)}")
        elif len(node) > 1 and node[:-1] not in nodes:
            faults.append(f"tree[{index}]: {list(node)} hangs at {list(node[:-1])}, which is not listed")
        elif node in nodes[:index]:
            faults.append(f"tree[{index}]: {list(node)} is listed twice")
    return faults
