"""Medusa heads as the passes hold them: a description and weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from optimc.plan import HeadsInfo
from optimc_passes.weights import Weight

DRAFT_VOCAB = "draft_vocab"
SHARED_PROJECTION = "projection.weight"


@dataclass(frozen=True)
class Heads:
    """K heads over a hidden size of d, guessing tokens of a draft vocabulary of V'."""

    info: HeadsInfo
    weights: Mapping[str, Weight]
    """"{k}.blocks.{b}.weight" [d, d], [d, 2d] at b = 0 if conditioned, and "{k}.blocks.{b}.bias" [d];
    "{k}.projection.weight" [V', d] if heads have their own; "projection.weight" [V', d] if they share one over a part
    of the vocabulary (rows of the model's output head, in its own format), nothing if they share the output head
    itself; "draft_vocab" int32 [V'], the part's token ids, ascending."""


def block_weight(head: int, block: int) -> str:
    """Return the name of a block's matrix."""
    return f"{head}.blocks.{block}.weight"


def block_bias(head: int, block: int) -> str:
    """Return the name of a block's bias."""
    return f"{head}.blocks.{block}.bias"


def own_projection(head: int) -> str:
    """Return the name of a head's own projection."""
    return f"{head}.projection.weight"
