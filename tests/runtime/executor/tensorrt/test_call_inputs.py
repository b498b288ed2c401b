"""A padded call holds what the call holds; padding sees something, and is written and fetched by nobody."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from optimc.plan.tensorrt_program import TensorRtAttention, TensorRtWindow
from optimc_passes.emit.tensorrt.profiles import model_profiles
from optimc_runtime.executor.base import StepPlan
from optimc_runtime.executor.step_groups import group_of
from optimc_runtime.executor.tensorrt.call_inputs import SLOTS, arrays_in, fill_inputs, lay_out_call, place_inputs
from optimc_runtime.executor.tensorrt.call_shapes import CallShapes

WINDOWS = (0, 5)
ATTENTION = TensorRtAttention(
    query_index="query_index",
    unpad_index="unpad_index",
    windows=tuple(
        TensorRtWindow(window=window, context_slots=f"slots_{window}", mask=f"mask_{window}") for window in WINDOWS
    ),
    layers=(),
)
LARGEST = model_profiles(max_seqs=6, max_step_tokens=96, max_seq_len=200)[0].largest
BLOCK, NULL_ROW = 4, 10_000


def make_step(phases: list[tuple[int, int]], rows: list[int]) -> StepPlan:
    counts = [count for _, count in phases]
    blocks = [-(-(context + count) // BLOCK) for context, count in phases]
    first = np.cumsum(blocks) - blocks
    table = np.zeros((len(phases), max(blocks)), np.int32)
    slots = []
    for b, (context, count) in enumerate(phases):
        table[b, : blocks[b]] = first[b] + np.arange(blocks[b])
        slots.append(first[b] * BLOCK + np.arange(context, context + count))
    return StepPlan(
        tokens=1000 + np.arange(sum(counts)),
        positions=np.concatenate([np.arange(c, c + n) for c, n in phases]),
        slots=np.concatenate(slots),
        query_start=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        context_len=np.array([context for context, _ in phases], np.int32),
        block_table=table,
        logits_rows=np.array(rows, np.int64),
    )


def filled(step: StepPlan, *, padded: bool) -> tuple[dict[str, np.ndarray], CallShapes, CallShapes]:
    """The inputs in a buffer of garbage, the call's shapes and the padded ones."""
    group = group_of(step, np.arange(len(step.context_len)))
    call = lay_out_call(step, group, ATTENTION, BLOCK, NULL_ROW)
    shapes = call.shapes.rounded_up(LARGEST) if padded else call.shapes
    places, nbytes = place_inputs(shapes, ATTENTION)
    arrays = arrays_in(np.full(nbytes, 0xAB, np.uint8), places)
    fill_inputs(arrays, step, group, call, ATTENTION, NULL_ROW)
    return arrays, call.shapes, shapes


PHASES = st.lists(st.tuples(st.integers(0, 120), st.integers(1, 16)), min_size=1, max_size=6)


@given(PHASES, st.data())
def test_padding_changes_nothing_and_does_nothing(phases: list[tuple[int, int]], data: st.DataObject) -> None:
    total = sum(count for _, count in phases)
    rows = sorted(data.draw(st.sets(st.integers(0, total - 1))))
    step = make_step(phases, rows)
    tight, call, _ = filled(step, padded=False)
    loose, _, shapes = filled(step, padded=True)
    for name, wanted in (("input_ids", step.tokens), ("position_ids", step.positions), (SLOTS, step.slots)):
        np.testing.assert_array_equal(loose[name][: len(wanted)], wanted)
    assert (loose[SLOTS][total:] == -1).all()
    np.testing.assert_array_equal(loose["logits_rows"][: len(rows)], rows)
    assert not loose["logits_rows"][len(rows) :].any()
    # Every token comes back from the place it was put at, and every place names a token.
    flat = loose["query_index"].ravel()
    np.testing.assert_array_equal(flat[loose["unpad_index"][:total]], np.arange(total))
    np.testing.assert_array_equal(
        loose["query_index"][: call.sequences, : call.queries], tight["query_index"][:, : call.queries]
    )
    for array in (loose["query_index"], loose["unpad_index"], loose["logits_rows"]):
        assert array.min() >= 0
    assert loose["query_index"].max() < shapes.tokens
    for window, name in enumerate(("slots_0", "slots_5")):
        slots, mask = loose[name], loose[name.replace("slots", "mask")]
        context, room = call.contexts[window], shapes.contexts[window]
        before = tight[name.replace("slots", "mask")]
        assert mask.any(axis=2).all(), "a query that sees nothing divides by zero"
        assert (slots[:, context:] == NULL_ROW).all()
        assert (slots[call.sequences :] == NULL_ROW).all()
        np.testing.assert_array_equal(slots[: call.sequences, :context], tight[name])
        real = mask[: call.sequences, : call.queries]
        np.testing.assert_array_equal(real[:, :, :context], before[:, :, :context])
        np.testing.assert_array_equal(real[:, :, room : room + call.queries], before[:, :, context:])
        assert not real[:, :, context:room].any()
        assert not real[:, :, room + call.queries :].any()


def test_places_are_aligned_and_apart() -> None:
    shapes = CallShapes(tokens=3, sequences=2, queries=2, rows=1, contexts=(7, 5))
    places, nbytes = place_inputs(shapes, ATTENTION)
    assert places["mask_0"].shape == (2, 2, 9)
    ends = sorted((place.offset, place.offset + int(np.prod(place.shape))) for place in places.values())
    assert all(offset % 256 == 0 for offset, _ in ends)
    assert all(end <= start for (_, end), (start, _) in pairwise(ends))
    assert nbytes == 10 * 256


def test_nothing_is_ever_empty() -> None:
    arrays, _, _ = filled(make_step([(0, 1)], []), padded=False)
    assert {name: array.shape for name, array in arrays.items() if name in ("logits_rows", "slots_0", "mask_0")} == {
        "logits_rows": (1,),
        "slots_0": (1, 1),
        "mask_0": (1, 1, 2),
    }
    assert arrays["slots_0"] == NULL_ROW
    np.testing.assert_array_equal(arrays["mask_0"], [[[False, True]]])


@given(PHASES)
def test_buckets_are_few_and_hold_what_falls_into_them(phases: list[tuple[int, int]]) -> None:
    _, call, bucket = filled(make_step(phases, []), padded=True)
    assert bucket.tokens >= call.tokens
    assert bucket.sequences >= call.sequences
    assert bucket.queries >= call.queries
    assert all(room >= context for room, context in zip(bucket.contexts, call.contexts, strict=True))
    assert bucket.sequences in (1, 2, 4, 6)
    assert bucket.queries in (1, 2, 4, 8, 16)
    assert bucket.tokens in (1, 2, 4, 8, 16, 32, 64, 96)
    assert set(bucket.contexts) <= {64, 96, 128, 192, 200}
    assert bucket.rounded_up(LARGEST) == bucket
