"""Which linear layers a quantizing pass works on: ignore patterns and group sizes that do not divide."""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from optimc_passes.quantize.linears import LinearWeight

RaggedPolicy = Literal["error", "ragged", "skip"]

HEAD_PATTERN = "lm_head"
"""An ignore pattern that means the output head, whatever the model calls it."""


class Selection(NamedTuple):
    """What to do with each linear layer of a model."""

    chosen: tuple[LinearWeight, ...]
    ignored: tuple[LinearWeight, ...]
    """Left dense because a pattern says so."""
    skipped: tuple[LinearWeight, ...]
    """Left dense because the group size does not divide their columns."""
    problems: tuple[str, ...]
    """Sentences that stop the pass."""


def select(linears: Sequence[LinearWeight], ignore: Sequence[str], group_size: int, ragged: RaggedPolicy) -> Selection:
    """Sort the layers. A `group_size` of -1, one group per row, divides everything."""
    problems = [
        f"ignore pattern '{pattern}' matches no linear layer, for example {linears[0].layer}"
        for pattern in ignore
        if pattern != HEAD_PATTERN and not any(matches(linear, pattern) for linear in linears)
    ]
    ignored = tuple(linear for linear in linears if any(matches(linear, pattern) for pattern in ignore))
    considered = [linear for linear in linears if linear not in ignored]
    uneven = tuple(linear for linear in considered if group_size != -1 and linear.shape[1] % group_size)
    if ragged == "error" and uneven:
        # The largest size up to the asked one that would divide every layer.
        common = math.gcd(*(linear.shape[1] for linear in considered))
        fitting = max(size for size in range(1, min(common, group_size) + 1) if common % size == 0)
        problems += [
            f"{linear.layer}: {linear.shape[1]} columns not divisible by group_size {group_size} "
            f"(shape {list(linear.shape)}); use {fitting} or add it to ignore, or set ragged to ragged or skip"
            for linear in uneven
        ]
    skipped = uneven if ragged == "skip" else ()
    chosen = tuple(linear for linear in considered if linear not in skipped)
    if not considered:
        problems.append("every linear layer is ignored, so there is nothing to quantize")
    elif not chosen:
        problems.append(f"group_size {group_size} divides the columns of no layer, so there is nothing to quantize")
    return Selection(chosen, ignored, skipped, tuple(problems))


def matches(linear: LinearWeight, pattern: str) -> bool:
    """Whether an ignore pattern means this layer.

    A pattern is a glob over the module name ("model.layers.0.*", "*.down_proj"), or a regular expression that must
    match all of it after the prefix "re:". `lm_head` always means the output head.
    """
    if pattern == HEAD_PATTERN and linear.is_head:
        return True
    if pattern.startswith("re:"):
        return re.fullmatch(pattern[3:], linear.layer) is not None
    return fnmatch.fnmatchcase(linear.layer, pattern) or fnmatch.fnmatchcase(linear.name, pattern)
