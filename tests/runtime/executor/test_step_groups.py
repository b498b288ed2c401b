"""Splitting and padding, by numbers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimc_runtime.executor import step_groups
from optimc_runtime.executor.base import StepPlan
from optimc_runtime.executor.step_groups import lay_out, split, view


def make_step(phases: list[tuple[int, int]], rows: list[int] | None = None, block_size: int = 4) -> StepPlan:
    """One sequence per (context, queries); blocks in order."""
    counts = [count for _, count in phases]
    blocks = [-(-(context + count) // block_size) for context, count in phases]
    first = np.cumsum(blocks) - blocks
    table = np.zeros((len(phases), max(blocks)), np.int32)
    slots = []
    for b, (context, count) in enumerate(phases):
        table[b, : blocks[b]] = first[b] + np.arange(blocks[b])
        slots.append(first[b] * block_size + np.arange(context, context + count))
    total = sum(counts)
    return StepPlan(
        tokens=np.arange(total),
        positions=np.concatenate([np.arange(c, c + n) for c, n in phases]),
        slots=np.concatenate(slots),
        query_start=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        context_len=np.array([context for context, _ in phases], np.int32),
        block_table=table,
        logits_rows=np.arange(total) if rows is None else np.array(rows, np.int64),
    )


def test_small_steps_run_at_once() -> None:
    assert len(split(make_step([(9, 1), (3, 1), (0, 8)]))) == 1


def test_a_long_chunk_does_not_pad_the_decoding_rows() -> None:
    groups = split(make_step([(100, 1)] * 7 + [(0, 400)] + [(50, 1)]))
    assert [group.sequences.tolist() for group in groups] == [[7], [0, 1, 2, 3, 4, 5, 6, 8]]


def test_rows_are_told_in_the_groups_own_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_groups, "MAX_WASTED_SCORES", 0)
    groups = split(make_step([(0, 1), (0, 30), (9, 1)], rows=[0, 30, 31]))
    assert [group.tokens.tolist() for group in groups] == [list(range(1, 31)), [31], [0]]
    assert [group.rows.tolist() for group in groups] == [[1], [2], [0]]
    assert [group.logits_rows.tolist() for group in groups] == [[29], [0], [0]]


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), min_size=1, max_size=9), st.integers(0, 2000))
def test_groups_partition_the_step_and_bound_the_padding(phases: list[tuple[int, int]], free: int) -> None:
    step = make_step(phases)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_groups, "MAX_WASTED_SCORES", free)
        groups = split(step)
    assert sorted(np.concatenate([group.sequences for group in groups]).tolist()) == list(range(len(phases)))
    assert sorted(np.concatenate([group.tokens for group in groups]).tolist()) == list(range(len(step.tokens)))
    for group in groups:
        queries = np.array([phases[b][1] for b in group.sequences])
        keys = np.array([sum(phases[b]) for b in group.sequences])
        padded, real = len(queries) * queries.max() * keys.max(), (queries * keys).sum()
        assert len(queries) == 1 or padded - real <= free
        layout = lay_out(step, group)
        places = group.tokens[layout.query_index]
        np.testing.assert_array_equal(places.ravel()[layout.unpad_index], group.tokens)
        for b, sequence in enumerate(group.sequences):
            mine = range(step.query_start[sequence], step.query_start[sequence + 1])
            assert set(places[b].tolist()) == set(mine)


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), min_size=1, max_size=5),
    st.integers(0, 12),
    st.sampled_from([1, 4, 16]),
)
def test_views_show_exactly_the_keys_of_the_definition(
    phases: list[tuple[int, int]], window: int, block_size: int
) -> None:
    step = make_step(phases, block_size=block_size)
    for group in split(step):
        layout = lay_out(step, group)
        seen = view(step, group, layout, window, block_size, null_row=10_000)
        context = seen.context_slots.shape[1]
        assert seen.mask.any(axis=2).all()
        for b, sequence in enumerate(group.sequences):
            (length, count), table = phases[sequence], step.block_table[sequence]
            for i in range(count):
                position = length + i
                wanted = [p for p in range(position + 1) if not window or p > position - window]
                slots = [table[p // block_size] * block_size + p % block_size for p in wanted if p < length]
                visible = seen.mask[b, i]
                assert seen.context_slots[b][visible[:context]].tolist() == slots
                assert np.flatnonzero(visible[context:]).tolist() == [p - length for p in wanted if p >= length]
        hidden = seen.context_slots == 10_000
        assert not (seen.mask[:, :, :context] & hidden[:, None, :]).any()


def test_a_window_reads_only_the_context_in_reach() -> None:
    step = make_step([(100, 1), (50, 1)])
    (group,) = split(step)
    seen = view(step, group, lay_out(step, group), window=8, block_size=4, null_row=999)
    assert seen.context_slots.shape == (2, 7)
