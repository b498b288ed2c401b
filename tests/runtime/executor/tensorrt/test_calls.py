"""Which sequences run together, by numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimc.errors import EngineError
from optimc_passes.emit.tensorrt.profiles import model_profiles
from optimc_runtime.executor.base import StepPlan
from optimc_runtime.executor.tensorrt.calls import CONTEXT_MOVES, Call, CallCosts, split_calls

PROFILES = model_profiles(max_seqs=8, max_step_tokens=256, max_seq_len=4096)
FREE = CallCosts(pass_bytes=1 << 60, context_bytes=((0, 100),))
"""Another pass over the weights costs more than any padding."""


def make_step(phases: list[tuple[int, int]], rows: list[int] | None = None) -> StepPlan:
    """One sequence per (context, queries)."""
    counts = [count for _, count in phases]
    total = sum(counts)
    return StepPlan(
        tokens=np.arange(total),
        positions=np.concatenate([np.arange(c, c + n) for c, n in phases]),
        slots=np.arange(total),
        query_start=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        context_len=np.array([context for context, _ in phases], np.int32),
        block_table=np.zeros((len(phases), 1), np.int32),
        logits_rows=np.arange(total) if rows is None else np.array(rows, np.int64),
    )


def split(step: StepPlan, costs: CallCosts = FREE) -> list[tuple[str, list[int]]]:
    return [(PROFILES[call.profile].name, call.group.sequences.tolist()) for call in split_calls(step, PROFILES, costs)]


def test_short_queries_run_together_and_long_chunks_alone_and_first() -> None:
    step = make_step([(100, 1), (0, 17), (7, 16), (3, 1), (0, 60)])
    assert split(step) == [("prefill", [1]), ("prefill", [4]), ("decode", [0, 2, 3])]


def test_more_sequences_than_the_profile_has_run_in_two_calls() -> None:
    step = make_step([(5, 1)] * 11)
    assert split(step) == [("decode", list(range(8))), ("decode", [8, 9, 10])]


def test_more_tokens_than_the_profile_has_run_in_two_calls() -> None:
    profiles = model_profiles(max_seqs=8, max_step_tokens=40, max_seq_len=64)
    calls = split_calls(make_step([(0, 16), (0, 16), (0, 8)]), profiles, FREE)
    assert [len(call.group.tokens) for call in calls] == [40]
    calls = split_calls(make_step([(0, 16), (0, 16), (0, 9)]), profiles, FREE)
    assert [len(call.group.tokens) for call in calls] == [32, 9]


def test_a_long_context_does_not_pad_the_others_once_that_moves_more_than_another_pass_reads() -> None:
    step = make_step([(10, 1), (4000, 1), (10, 1), (10, 1)])
    padding = CONTEXT_MOVES * 3 * (4000 - 10) * 100
    assert split(step, CallCosts(padding, ((0, 100),))) == [("decode", [0, 1, 2, 3])]
    assert split(step, CallCosts(padding - 1, ((0, 100),))) == [("decode", [0, 1, 2]), ("decode", [3])]
    assert split(step, CallCosts(1, ((0, 100),))) == [("decode", [1]), ("decode", [0, 2, 3])]


def test_layers_with_a_window_count_no_more_context_than_it() -> None:
    step = make_step([(10, 1), (4000, 1)])
    assert split(step, CallCosts(CONTEXT_MOVES * 100, ((12, 100),))) == [("decode", [0, 1])]


def test_a_chunk_with_more_logits_rows_than_the_profile_runs_once_for_each_part() -> None:
    small = tuple(profile.model_copy(update={"largest": {**profile.largest, "R": 16}}) for profile in PROFILES)
    calls = split_calls(make_step([(0, 40), (3, 16), (3, 16)]), small, FREE)
    assert [(call.is_decode, call.group.rows.tolist()) for call in calls] == [
        (False, list(range(16))),
        (False, list(range(16, 32))),
        (False, list(range(32, 40))),
        (True, list(range(40, 56))),
        (True, list(range(56, 72))),
    ]


def test_sequences_without_tokens_run_in_no_call() -> None:
    assert split(make_step([(5, 0), (6, 1)])) == [("decode", [1])]


@pytest.mark.parametrize(
    ("phase", "says"),
    [
        ((0, 257), "of 257 tokens in a step; the engine was built for 256"),
        ((4097, 1), "context of 4097 tokens; .* 4096"),
    ],
)
def test_what_fits_no_profile_is_refused(phase: tuple[int, int], says: str) -> None:
    with pytest.raises(EngineError, match=says):
        split(make_step([phase]))


@given(
    st.lists(st.tuples(st.integers(0, 4096), st.integers(0, 40)), min_size=1, max_size=20),
    st.integers(0, 1 << 22),
    st.data(),
)
def test_calls_partition_the_step_and_fit_their_profiles(
    phases: list[tuple[int, int]], pass_bytes: int, data: Any
) -> None:
    total = sum(count for _, count in phases)
    rows = sorted(data.draw(st.sets(st.integers(0, max(0, total - 1)), max_size=total)))
    step = make_step(phases, rows)
    calls: list[Call] = split_calls(step, PROFILES, CallCosts(pass_bytes, ((0, 64), (100, 64))))
    sequences = [b for call in calls for b in call.group.sequences.tolist()]
    assert sorted(sequences) == [b for b, (_, count) in enumerate(phases) if count]
    assert sorted(row for call in calls for row in call.group.rows.tolist()) == list(range(len(rows)))
    for call in calls:
        largest, queries = PROFILES[call.profile].largest, [phases[b][1] for b in call.group.sequences]
        assert call.is_decode == (PROFILES[call.profile].name == "decode") == (max(queries) <= 16)
        assert len(queries) <= largest["B"]
        assert max(queries) <= largest["Q"]
        assert sum(queries) == len(call.group.tokens) <= largest["T"]
        assert len(call.group.rows) <= largest["R"]
        np.testing.assert_array_equal(call.group.tokens[call.group.logits_rows], step.logits_rows[call.group.rows])
