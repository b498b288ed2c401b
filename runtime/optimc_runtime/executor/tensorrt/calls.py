"""A step's calls: which sequences run together, so that each call fits one of the engine's optimization profiles.

Sequences with few tokens (decodes, trees, ends of prompts) share decode calls; a longer chunk is a prefill call of its
own. Calls read the pool as it was before the step and write rows of their own sequences only, so their order changes no
answer. Decided from counts alone; nothing of a model or a device is known here.

Letters: T tokens, B sequences, Q longest query, C longest context in reach, R rows that need logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from optimc.errors import EngineError
from optimc.plan.tensorrt_program import ShapeLetter, TensorRtProfile
from optimc_runtime.executor.base import StepPlan
from optimc_runtime.executor.step_groups import Group, group_of

Sizes = Mapping[ShapeLetter, int]

CONTEXT_MOVES = 3
"""Times that attention moves a row of context, real or padding: gathered, written, read."""


@dataclass(frozen=True, slots=True)
class CallCosts:
    """What padding is weighed against."""

    pass_bytes: int
    """What each call reads whatever its size: the engine's weights."""
    context_bytes: tuple[tuple[int, int], ...]
    """(window, bytes that a token of context has in all layers of that window), 0 for none."""


@dataclass(frozen=True, slots=True)
class Call:
    """Sequences of a step that one execution of the engine answers."""

    profile: int
    """Of the engine: where in `TensorRtEngine.profiles` its shapes lie."""
    is_decode: bool
    """Whether its shapes are rounded up to few, which come back."""
    group: Group


def split_calls(plan: StepPlan, profiles: tuple[TensorRtProfile, ...], costs: CallCosts) -> list[Call]:
    """Partition the step's sequences into calls, long ones first: the host then has the most time for the next.

    A chunk with more logits rows than its profile has is run once for each part of them. Raises EngineError for a chunk
    or a context longer than any profile.
    """
    by_name = {profile.name: index for index, profile in enumerate(profiles)}
    decode, prefill = (profiles[by_name[name]].largest for name in ("decode", "prefill"))
    queries = np.diff(plan.query_start)
    _check(queries, plan.context_len, decode, prefill)
    calls = []
    for sequence in np.flatnonzero(queries > decode["Q"]).tolist():
        group = group_of(plan, np.array([sequence], np.intp))
        calls += [Call(by_name["prefill"], False, part) for part in _row_parts(group, prefill["R"])]
    short = np.flatnonzero((queries > 0) & (queries <= decode["Q"]))
    for sequences in _decode_groups(plan, short, decode, costs):
        calls.append(Call(by_name["decode"], True, group_of(plan, np.sort(sequences))))
    return calls


def _check(queries: NDArray[np.int32], contexts: NDArray[np.int32], decode: Sizes, prefill: Sizes) -> None:
    longest, most = int(queries.max(initial=0)), max(decode["Q"], prefill["Q"])
    if longest > most:
        raise EngineError(f"a sequence of {longest} tokens in a step; the engine was built for {most}")
    context, reach = int(contexts.max(initial=0)), min(decode["C"], prefill["C"])
    if context > reach:
        raise EngineError(f"a sequence with a context of {context} tokens; the engine was built for {reach}")


def _row_parts(group: Group, most: int) -> Iterator[Group]:
    """Yield the group once for every `most` of its logits rows, at least once."""
    for first in range(0, max(1, len(group.rows)), most):
        part = slice(first, first + most)
        yield Group(group.sequences, group.tokens, group.rows[part], group.logits_rows[part])


def _decode_groups(
    plan: StepPlan, sequences: NDArray[np.intp], largest: Sizes, costs: CallCosts
) -> list[NDArray[np.intp]]:
    """Return groups that fit the profile, in which padding the context moves no more bytes than another call reads."""
    queries = np.diff(plan.query_start)[sequences]
    starts, stops = plan.query_start[sequences], plan.query_start[sequences + 1]
    rows = np.searchsorted(plan.logits_rows, stops) - np.searchsorted(plan.logits_rows, starts)
    context = _context_bytes(plan.context_len[sequences], costs)
    groups: list[list[int]] = []
    longest = moved = tokens = asked = 0
    for place in np.argsort(-context, kind="stable").tolist():
        if groups:
            padded = longest * (len(groups[-1]) + 1) - (moved + int(context[place]))
            if (
                len(groups[-1]) < largest["B"]
                and tokens + int(queries[place]) <= largest["T"]
                and asked + int(rows[place]) <= largest["R"]
                and CONTEXT_MOVES * padded <= costs.pass_bytes
            ):
                groups[-1].append(place)
                moved, tokens, asked = (
                    moved + int(context[place]),
                    tokens + int(queries[place]),
                    asked + int(rows[place]),
                )
                continue
        groups.append([place])
        longest = moved = int(context[place])
        tokens, asked = int(queries[place]), int(rows[place])
    return [sequences[np.array(group, np.intp)] for group in groups]


def _context_bytes(contexts: NDArray[np.int32], costs: CallCosts) -> NDArray[np.int64]:
    """Return what of each sequence's context lies in reach of the layers, in bytes [B]."""
    total = np.zeros(len(contexts), np.int64)
    for window, nbytes in costs.context_bytes:
        total += nbytes * (np.minimum(contexts, window - 1) if window else contexts).astype(np.int64)
    return total
