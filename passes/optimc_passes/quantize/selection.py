"""Which linear layers a quantizing pass works on: patterns over their names, and group sizes that do not divide."""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from optimc_passes.quantize.linears import LinearWeight

RaggedPolicy = Literal["error", "ragged", "skip"]

EVERY_LAYER = "*"
HEAD_PATTERN = "lm_head"
"""A pattern that means the output head, whatever the model calls it."""
EMBEDDING_PATTERN = "embedding"
"""The pattern that means the input embedding, whatever the model calls it; no other one does."""


class Selection(NamedTuple):
    """What to do with each linear layer a pass is about; layers that `only` does not name are in none of these."""

    chosen: tuple[LinearWeight, ...]
    ignored: tuple[LinearWeight, ...]
    """Left as they are because a pattern says so."""
    skipped: tuple[LinearWeight, ...]
    """Left as they are because the group size does not divide their columns."""
    problems: tuple[str, ...]
    """Sentences that stop the pass."""


def select(
    linears: Sequence[LinearWeight],
    *,
    only: Sequence[str] = (EVERY_LAYER,),
    ignore: Sequence[str],
    group_size: int,
    ragged: RaggedPolicy,
) -> Selection:
    """Sort the layers that `only` names. A `group_size` of -1, one group per row, divides everything."""
    problems = _idle_patterns(linears, only, ignore)
    named = [linear for linear in linears if any(matches(linear, pattern) for pattern in only)]
    ignored = tuple(linear for linear in named if any(matches(linear, pattern) for pattern in ignore))
    considered = [linear for linear in named if linear not in ignored]
    uneven = tuple(linear for linear in considered if group_size != -1 and linear.shape[1] % group_size)
    if ragged == "error" and uneven:
        problems += _uneven_widths(considered, uneven, group_size)
    skipped = uneven if ragged == "skip" else ()
    chosen = tuple(linear for linear in considered if linear not in skipped)
    if ignored and not considered:
        problems.append(
            f"nothing to quantize: ignore covers all that only names ({name_layers(ignored)}); "
            "the head is ignored unless ignore says otherwise, `ignore: []` ignores nothing"
        )
    elif considered and not chosen:
        problems.append(f"nothing to quantize: group_size {group_size} divides the columns of no layer")
    return Selection(chosen, ignored, skipped, tuple(problems))


def matches(linear: LinearWeight, pattern: str) -> bool:
    """Whether a pattern means this layer.

    A pattern is a glob over the module name ("model.layers.0.*", "*.down_proj"), or a regular expression that must
    match all of it after the prefix "re:". `lm_head` always means the output head, and `embedding` alone the embedding.
    """
    if linear.is_embedding:
        return pattern == EMBEDDING_PATTERN
    if pattern == HEAD_PATTERN and linear.is_head:
        return True
    if pattern.startswith("re:"):
        return re.fullmatch(pattern[3:], linear.layer) is not None
    return fnmatch.fnmatchcase(linear.layer, pattern) or fnmatch.fnmatchcase(linear.name, pattern)


def name_layers(linears: Sequence[LinearWeight]) -> str:
    """Name one layer; of several, how many there are and the first: nobody reads a list of two hundred."""
    first = linears[0].layer
    return first if len(linears) == 1 else f"{len(linears)} layers, e.g. {first}"


def _idle_patterns(linears: Sequence[LinearWeight], only: Iterable[str], ignore: Iterable[str]) -> list[str]:
    """Return a sentence for each pattern that matches nothing. The head, ignored by default, need not exist."""
    listed = [("only", pattern) for pattern in only]
    listed += [("ignore", pattern) for pattern in ignore if pattern != HEAD_PATTERN]
    return [
        f"{option} pattern '{pattern}' matches no linear layer, for example {linears[0].layer}"
        for option, pattern in listed
        if not any(matches(linear, pattern) for linear in linears)
    ]


def _uneven_widths(considered: Sequence[LinearWeight], uneven: Sequence[LinearWeight], group_size: int) -> list[str]:
    """Return a sentence for each number of columns that the group size does not divide."""
    # The largest size up to the asked one that would divide every layer; a power of two if one does, as kernels are
    # fastest with those, unless it is too small to be wanted.
    common = math.gcd(*(linear.shape[1] for linear in considered))
    sizes = [size for size in range(1, min(common, group_size) + 1) if common % size == 0]
    fitting = max(sizes, key=lambda size: (size >= 16 and size.bit_count() == 1, size))
    by_width: dict[int, list[LinearWeight]] = {}
    for linear in uneven:
        by_width.setdefault(linear.shape[1], []).append(linear)
    return [
        f"{width} columns ({name_layers(layers)}): not divisible by group_size {group_size}; "
        f"use {fitting} or add the layers to ignore, or set ragged to ragged or skip"
        for width, layers in by_width.items()
    ]
