"""A call's inputs as the engine reads them: padded to its shapes, each written once, where it is copied from.

Padding computes something finite and nothing of it arrives anywhere: its tokens are token 0 with slot -1, its queries
repeat their sequence's last one, its sequences see their own first key, its context is the null row, hidden by the
mask, and its logits are those of the call's first token, never fetched.

Letters: T tokens, B sequences, Q longest query, C longest context in reach, R rows that need logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optimc.plan.tensorrt_program import TensorRtAttention
from optimc_runtime.executor.base import StepPlan
from optimc_runtime.executor.step_groups import Group, QueryLayout, WindowView, lay_out, view
from optimc_runtime.executor.tensorrt.call_shapes import CallShapes

SLOTS = "optimc.slots"
"""Beside the engine's inputs: int64 [T], where `commit_rows` writes each token's K/V row, -1 for nowhere."""

DROPPED = -1

_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class InputPlace:
    """One input in the buffer that all of them share."""

    offset: int
    """Bytes, a multiple of 256."""
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LaidOutCall:
    """A call's contents before padding."""

    layout: QueryLayout
    views: tuple[WindowView, ...]
    """One per window."""
    shapes: CallShapes
    """Without padding."""


def lay_out_call(
    plan: StepPlan, group: Group, attention: TensorRtAttention, block_size: int, null_row: int
) -> LaidOutCall:
    """Return where a call's tokens stand and what they see. `null_row` is the pool row that holds zeros."""
    layout = lay_out(plan, group)
    views = tuple(view(plan, group, layout, window.window, block_size, null_row) for window in attention.windows)
    sequences, queries = layout.query_index.shape
    contexts = tuple(seen.context_slots.shape[1] for seen in views)
    shapes = CallShapes(len(group.tokens), sequences, queries, len(group.logits_rows), contexts)
    return LaidOutCall(layout, views, shapes.at_least_one())


def place_inputs(shapes: CallShapes, attention: TensorRtAttention) -> tuple[dict[str, InputPlace], int]:
    """Return where each input lies, the engine's and SLOTS, and how many bytes all take."""
    tokens, batch = shapes.tokens, (shapes.sequences, shapes.queries)
    wanted: list[tuple[str, str, tuple[int, ...]]] = [
        ("input_ids", "int64", (tokens,)),
        ("position_ids", "int64", (tokens,)),
        ("logits_rows", "int64", (shapes.rows,)),
        (attention.query_index, "int64", batch),
        (attention.unpad_index, "int64", (tokens,)),
        (SLOTS, "int64", (tokens,)),
    ]
    for window, context in zip(attention.windows, shapes.contexts, strict=True):
        wanted.append((window.context_slots, "int64", (shapes.sequences, context)))
        wanted.append((window.mask, "bool", (*batch, context + shapes.queries)))
    places = {}
    offset = 0
    for name, dtype, shape in wanted:
        places[name] = InputPlace(offset, dtype, shape)
        nbytes = prod(shape) * np.dtype(dtype).itemsize
        offset += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    return places, offset


def arrays_in(buffer: NDArray[np.uint8], places: Mapping[str, InputPlace]) -> dict[str, NDArray[Any]]:
    """Return the inputs as views of a buffer uint8 [bytes]."""
    arrays = {}
    for name, place in places.items():
        nbytes = prod(place.shape) * np.dtype(place.dtype).itemsize
        arrays[name] = buffer[place.offset : place.offset + nbytes].view(place.dtype).reshape(place.shape)
    return arrays


def fill_inputs(
    arrays: Mapping[str, NDArray[Any]],
    plan: StepPlan,
    group: Group,
    call: LaidOutCall,
    attention: TensorRtAttention,
    null_row: int,
) -> None:
    """Write a call's inputs, padded to the shapes of `arrays`."""
    _fill(arrays["input_ids"], plan.tokens[group.tokens], 0)
    _fill(arrays["position_ids"], plan.positions[group.tokens], 0)
    _fill(arrays["logits_rows"], group.logits_rows, 0)
    _fill(arrays[SLOTS], plan.slots[group.tokens], DROPPED)
    sequences, queries = call.layout.query_index.shape
    index = arrays[attention.query_index]
    row, place = np.divmod(call.layout.unpad_index, queries)
    _fill(arrays[attention.unpad_index], row * index.shape[1] + place, 0)
    index[:sequences, :queries] = call.layout.query_index
    # The last place stands for the sequence's last token, whether it is a query or padding itself.
    index[:sequences, queries:] = call.layout.query_index[:, -1:]
    index[sequences:] = 0
    for window, seen in zip(attention.windows, call.views, strict=True):
        _fill_view(arrays[window.context_slots], arrays[window.mask], seen, null_row)


def _fill_view(slots: NDArray[np.int64], mask: NDArray[np.bool_], seen: WindowView, null_row: int) -> None:
    """Write what layers of one window see: slots [B, C], mask [B, Q, C + Q]."""
    sequences, context = seen.context_slots.shape
    queries, padded = seen.mask.shape[1], slots.shape[1]
    slots[:sequences, :context] = seen.context_slots
    slots[:sequences, context:] = null_row
    slots[sequences:] = null_row
    mask[:sequences, :queries, :context] = seen.mask[:, :, :context]
    mask[:sequences, :queries, context:padded] = False
    mask[:sequences, :queries, padded : padded + queries] = seen.mask[:, :, context:]
    mask[:sequences, :queries, padded + queries :] = False
    mask[:sequences, queries:] = mask[:sequences, queries - 1 : queries]
    mask[sequences:] = False
    mask[sequences:, :, padded] = True


def _fill(target: NDArray[Any], values: NDArray[Any], rest: int) -> None:
    target[: len(values)] = values
    target[len(values) :] = rest
