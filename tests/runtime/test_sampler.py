"""Sampling: the documented order of filters, exact distributions, reproducible draws, honest logprobs."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from optimc.errors import EngineError, RequestError
from optimc_runtime import _native
from optimc_runtime.request import SamplingParams
from optimc_runtime.sampler import NothingToChooseError, RowMasks, Sampled, SamplingState, sample


def state_of(vocab: int, prompt: list[int] | None = None, seed: int = 0, **params: Any) -> SamplingState:
    stop_ids = params.pop("stop_ids", frozenset())
    return SamplingState(SamplingParams(**params), prompt or [], stop_ids, vocab, seed)


def one(row: np.ndarray, state: SamplingState) -> Sampled:
    return sample(row[None], [state])[0]


def row_of(vocab: int, seed: int, scale: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(vocab) * scale).astype(np.float32)


def reference_probabilities(row: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The distribution temperature, top_k, top_p and min_p leave, by sorting, in double precision."""
    scaled = row.astype(np.float64) / params.temperature
    order = np.lexsort((np.arange(len(row)), -scaled))
    probabilities = np.exp(scaled - scaled.max())
    if params.top_k:
        probabilities[order[params.top_k :]] = 0
    probabilities /= probabilities.sum()
    if params.top_p < 1:
        reached = np.cumsum(probabilities[order]) >= params.top_p
        probabilities[order[int(np.argmax(reached)) + 1 :]] = 0
    probabilities[probabilities < params.min_p * probabilities.max()] = 0
    return probabilities / probabilities.sum()


def draw_many(row: np.ndarray, params: SamplingParams, draws: int, seed: int) -> np.ndarray:
    """Draw for output positions 0..draws-1 of one sequence, straight from the kernel."""
    state = SamplingState(params, [], frozenset(), len(row), seed)
    tokens = np.empty(draws, np.int64)
    for position in range(draws):
        (tokens[position],), _, failure = _native.sample_rows(row[None], [state.row])
        assert failure is None
        state.accept(int(tokens[position]))
    return tokens


ROW8 = np.array([1.0, 0.2, -0.5, 2.0, 0.9, -3.0, 1.0, -0.1], np.float32)

# Chi-square quantiles at p = 1e-4 for 1..7 degrees of freedom.
CHI_SQUARE_LIMIT = [0.0, 15.14, 18.42, 21.11, 23.51, 25.74, 27.86, 29.88]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_p": 0.7},
        {"top_k": 3},
        {"min_p": 0.12},
        {"top_k": 5, "top_p": 0.8, "min_p": 0.12},
    ],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_200k_draws_follow_the_filtered_distribution(temperature: float, options: dict[str, Any]) -> None:
    params = SamplingParams(temperature=temperature, **options)
    want = reference_probabilities(ROW8, params)
    counts = np.bincount(draw_many(ROW8, params, 200_000, seed=1234), minlength=8)
    assert counts[want == 0].sum() == 0
    kept = want > 0
    chi_square = ((counts[kept] - 200_000 * want[kept]) ** 2 / (200_000 * want[kept])).sum()
    assert chi_square < CHI_SQUARE_LIMIT[kept.sum() - 1]


def test_draws_of_a_large_vocabulary_stay_inside_the_nucleus_and_follow_it() -> None:
    row = row_of(2000, 3)
    params = SamplingParams(top_k=400, top_p=0.8, min_p=0.001)
    want = reference_probabilities(row, params)
    tokens = draw_many(row, params, 10_000, seed=5)
    assert (want[tokens] > 0).all()
    likely = np.flatnonzero(want > 0.001)
    counts = np.bincount(tokens, minlength=2000)[likely]
    expected = 10_000 * want[likely]
    deviation = (counts - expected) / np.sqrt(expected)
    assert np.abs(deviation).max() < 5


def test_temperature_zero_is_argmax_with_the_lowest_id_of_equals() -> None:
    rows = np.stack([row_of(1000, seed) for seed in range(20)])
    rows[3, [700, 200, 900]] = 50
    chosen = [sampled.token_id for sampled in sample(rows, [state_of(1000, temperature=0) for _ in rows])]
    assert chosen == rows.argmax(axis=1).tolist()
    assert chosen[3] == 200


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-6}], ids=str)
def test_the_narrowest_filters_are_greedy(options: dict[str, Any]) -> None:
    for seed in range(20):
        row = row_of(500, seed)
        row[37] = np.nextafter(row.max(), -np.inf, dtype=np.float32)  # a runner-up one bit away
        if "temperature" in options:
            row[37] = row.max() - np.float32(0.01)
        assert one(row, state_of(500, seed=seed, **options)).token_id == int(row.argmax())


def test_top_k_takes_exactly_k_of_equals_lowest_ids_first() -> None:
    tokens = draw_many(np.zeros(100, np.float32), SamplingParams(top_k=3), 2000, seed=0)
    assert set(tokens.tolist()) == {0, 1, 2}


def test_top_k_larger_than_the_vocabulary_keeps_all() -> None:
    assert one(ROW8, state_of(8, top_k=1000)) == one(ROW8, state_of(8))


def test_draws_are_a_function_of_seed_and_position_only() -> None:
    """The same sequence alone and in any company of any size draws the same tokens."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((12, 300)).astype(np.float32)
    alone = state_of(300, seed=42, top_p=0.95)
    want = []
    for row in logits:
        want.append(one(row, alone).token_id)
        alone.accept(want[-1])
    state = state_of(300, seed=42, top_p=0.95)
    for step, row in enumerate(logits):
        mates = [state_of(300, seed=int(rng.integers(99)), temperature=float(rng.random() * 2)) for _ in range(step)]
        place = int(rng.integers(step + 1))
        batch = np.insert(rng.standard_normal((step, 300)).astype(np.float32), place, row, axis=0)
        mates.insert(place, state)
        chosen = sample(batch, mates)[place].token_id
        assert chosen == want[step]
        assert sample(batch, mates)[place].token_id == chosen, "sampling does not change the state"
        state.accept(chosen)


def test_seeds_and_positions_change_draws_and_negative_seeds_are_seeds() -> None:
    row = np.zeros(1000, np.float32)
    assert len({one(row, state_of(1000, seed=seed)).token_id for seed in range(50)}) > 40
    assert len(set(draw_many(row, SamplingParams(), 50, seed=0).tolist())) > 40
    assert one(row, state_of(1000, seed=-1)) == one(row, state_of(1000, seed=2**64 - 1))


def penalized(row: np.ndarray, prompt: list[int], output: list[int], params: SamplingParams) -> np.ndarray:
    logits = row.astype(np.float64).copy()
    for token in set(prompt) | set(output):
        logits[token] = (
            logits[token] / params.repetition_penalty
            if logits[token] > 0
            else logits[token] * params.repetition_penalty
        )
    for token, count in Counter(output).items():
        logits[token] -= params.presence_penalty + params.frequency_penalty * count
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    return logits


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.7},
        {"repetition_penalty": 0.6},
        {"presence_penalty": 1.5},
        {"presence_penalty": -0.5},
        {"frequency_penalty": 0.4},
        {"logit_bias": {3: 5.0, 11: -100.0}},
        {"repetition_penalty": 1.3, "presence_penalty": 0.3, "frequency_penalty": 0.2, "logit_bias": {5: 1.0}},
    ],
    ids=str,
)
def test_greedy_under_penalties_equals_the_formulas_over_a_whole_generation(options: dict[str, Any]) -> None:
    prompt, output = [1, 2, 2, 19], []
    state = state_of(20, prompt, temperature=0, **options)
    rows = [row_of(20, 0, 2.0) + row_of(20, step, 0.1) for step in range(60)]
    for row in rows:
        chosen = one(row, state).token_id
        assert chosen == int(np.argmax(penalized(row, prompt, output, state.params)))
        output.append(chosen)
        state.accept(chosen)


def test_a_frequency_penalty_breaks_a_loop_at_the_count_that_outweighs_the_gap() -> None:
    row = np.array([3.0, 0.0, 2.0], np.float32)  # gap 1, penalty 0.3: four repetitions, then the next token
    state = state_of(3, [0], temperature=0, frequency_penalty=0.3)
    output = []
    for _ in range(5):
        output.append(one(row, state).token_id)
        state.accept(output[-1])
    assert output == [0, 0, 0, 0, 2]


def test_presence_and_frequency_ignore_the_prompt() -> None:
    state = state_of(3, [0, 0, 0], temperature=0, presence_penalty=2, frequency_penalty=2)
    assert one(np.array([1.0, 0.5, 0.0], np.float32), state).token_id == 0


def test_seen_tokens_grow_past_their_first_allocation() -> None:
    state = state_of(5000, [7], temperature=0, repetition_penalty=1.1)
    for token in range(1000):
        state.accept(token)
        state.accept(token)
    assert sorted(state.seen_ids.tolist()) == list(range(1000))
    assert set(state.seen_counts.tolist()) == {2}


def test_min_tokens_masks_every_stop_token_until_reached_whatever_the_bias() -> None:
    row = np.array([9.0, 8.0, 7.0, 1.0], np.float32)
    state = state_of(4, temperature=0, min_tokens=2, stop_ids=frozenset({0, 1, 2, 900}), logit_bias={1: 100.0})
    chosen = []
    for _ in range(3):
        chosen.append(one(row, state).token_id)
        state.accept(chosen[-1])
    assert chosen == [3, 3, 1]


def test_logprobs_are_of_the_raw_logits_whatever_was_done_to_choose() -> None:
    row = row_of(1000, 1)
    state = state_of(
        1000, [5], temperature=0.3, top_k=5, logprobs=4, repetition_penalty=2.0, logit_bias={int(row.argmin()): 100.0}
    )
    sampled = one(row, state)
    want = row.astype(np.float64) - np.log(np.exp(row.astype(np.float64)).sum())
    assert sampled.token_id == int(row.argmin())
    assert sampled.logprob is not None
    assert sampled.logprob.token_id == sampled.token_id
    assert sampled.logprob.logprob == pytest.approx(want[sampled.token_id], abs=1e-5)
    assert [token for token, _ in sampled.logprob.top] == np.argsort(-row, kind="stable")[:4].tolist()
    for token, logprob in sampled.logprob.top:
        assert logprob == pytest.approx(want[token], abs=1e-5)


def test_logprobs_are_given_per_row_as_asked() -> None:
    rows = np.stack([ROW8] * 4)
    rows[3, :] = 1.0
    states = [state_of(8, temperature=0, logprobs=count) for count in (None, 0, 2, 20)]
    sampled = sample(rows, states)
    assert sampled[0].logprob is None
    assert sampled[1].logprob is not None
    assert sampled[1].logprob.top == ()
    assert sampled[2].logprob is not None
    assert [token for token, _ in sampled[2].logprob.top] == [3, 0]
    assert sampled[3].logprob is not None
    assert [token for token, _ in sampled[3].logprob.top] == list(range(8))
    assert all(value == pytest.approx(np.log(1 / 8), abs=1e-6) for _, value in sampled[3].logprob.top)


def test_infinite_logits_share_everything() -> None:
    row = row_of(50, 0)
    row[[4, 30]] = np.inf
    row[7] = -np.inf
    assert set(draw_many(row, SamplingParams(top_p=0.99), 200, seed=0).tolist()) == {4, 30}
    sampled = one(row, state_of(50, temperature=0, logprobs=3))
    assert sampled.token_id == 4
    assert sampled.logprob is not None
    assert sampled.logprob.logprob == pytest.approx(np.log(0.5))
    assert sampled.logprob.top[2][1] == -np.inf


def test_a_nan_is_an_error_that_names_the_row() -> None:
    rows = np.stack([ROW8] * 3)
    rows[1, 5] = np.nan
    with pytest.raises(EngineError, match=r"row 1 of 3 \(output position 0\): the logits contain NaN"):
        sample(rows, [state_of(8, temperature=0) for _ in rows])
    with pytest.raises(EngineError, match="row 1 of 3"):
        sample(rows, [state_of(8, logit_bias={5: 1.0}) for _ in rows])


def test_a_row_without_a_choice_is_an_error() -> None:
    with pytest.raises(EngineError, match="row 0 of 1 .*every token is masked out"):
        one(np.full(8, -np.inf, np.float32), state_of(8))
    with pytest.raises(EngineError, match="every token is masked out"):
        one(ROW8, state_of(8, min_tokens=1, stop_ids=frozenset(range(8))))


def test_logits_are_only_read_even_from_a_read_only_view() -> None:
    rows = np.stack([ROW8] * 2)
    rows.setflags(write=False)
    states = [state_of(8, [1, 2], repetition_penalty=2.0, logit_bias={3: -5.0}, logprobs=2) for _ in rows]
    assert sample(rows, states)[0] == sample(np.asfortranarray(rows), states)[0]
    assert (rows == ROW8).all()


@pytest.mark.parametrize(
    ("options", "prompt", "message"),
    [
        ({"logit_bias": {8: 1.0}}, [], "logit_bias: token id 8 is outside the vocabulary of 8"),
        ({"repetition_penalty": 1.5}, [3, 99], "prompt: token id 99 is outside the vocabulary of 8"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(options: dict[str, Any], prompt: list[int], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        state_of(8, prompt, **options)


@pytest.mark.parametrize(
    "options", [{"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.5}, {"top_k": 4, "top_p": 0.01}], ids=str
)
def test_a_negative_zero_that_is_the_maximum_equals_positive_zeros(options: dict[str, Any]) -> None:
    row = np.full(200, -1, np.float32)
    row[5], row[150] = -0.0, 0.0
    want = draw_many(np.where(row == 0, np.float32(0), row), SamplingParams(**options), 100, seed=0)
    assert (draw_many(row, SamplingParams(**options), 100, seed=0) == want).all()


def test_no_rows_give_no_tokens() -> None:
    assert sample(np.zeros((0, 8), np.float32), []) == []


def test_masks_come_last_and_leave_the_reported_logprobs_alone() -> None:
    row = row_of(40, 3)
    best, second = np.argsort(-row)[:2].tolist()
    words = np.full((1, 2), 0xFFFFFFFF, np.uint32)
    words[0, best >> 5] ^= np.uint32(1 << (best & 31))
    masks = RowMasks(words, np.array([0], np.int32))
    # The bias would make the forbidden token win anywhere.
    state = state_of(40, temperature=0, logprobs=2, logit_bias={best: 100})
    [masked] = sample(row[None], [state], masks)
    assert masked.token_id == second
    assert masked.logprob is not None
    [free] = sample(row[None], [state])
    assert free.token_id == best
    assert free.logprob is not None
    assert masked.logprob.top == free.logprob.top
    assert masked.logprob.logprob == dict(free.logprob.top)[second]


def test_a_mask_that_leaves_nothing_fails_in_a_way_of_its_own() -> None:
    masks = RowMasks(np.zeros((1, 2), np.uint32), np.array([0], np.int32))
    with pytest.raises(NothingToChooseError, match="every token is masked out"):
        sample(row_of(40, 0)[None], [state_of(40)], masks)
