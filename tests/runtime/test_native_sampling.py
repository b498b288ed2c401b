"""Each sampling kernel equals its scalar reference, and the binding refuses what the kernels may not see."""

from typing import Any

import numpy as np
import pytest

from optimc_runtime import _native

SIZES = [1, 7, 16, 31, 32, 33, 1023, 1024, 1025, 5000, 49152]


def row_of(size: int, seed: int, scale: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)


def tied_row(size: int, seed: int) -> np.ndarray:
    """Few distinct values, some tokens masked out: ties everywhere."""
    rng = np.random.default_rng(seed)
    row = rng.integers(-4, 3, size).astype(np.float32)
    row[rng.random(size) < 0.2] = -np.inf
    row[rng.integers(size)] = 3.0
    return row


@pytest.mark.parametrize("size", SIZES)
def test_row_max_equals_its_reference(size: int) -> None:
    for seed in range(5):
        for row in (row_of(size, seed), tied_row(size, seed), -np.abs(row_of(size, seed))):
            assert _native.row_max(row) == _native.row_max_reference(row)
            assert _native.row_max(row)[1] == int(np.argmax(row))


def test_row_max_takes_the_lowest_id_of_equals_across_blocks_and_signed_zeros() -> None:
    row = np.full(4000, -1, np.float32)
    row[[10, 1500, 3999]] = 5
    assert _native.row_max(row) == (5.0, 10, False)
    row = np.full(4000, -1, np.float32)
    row[100], row[2000] = -0.0, 0.0
    assert _native.row_max(row)[1] == 100


@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF])
@pytest.mark.parametrize("place", [0, 15, 1024, 4998])
def test_row_max_sees_every_kind_of_nan(bits: int, place: int) -> None:
    row = row_of(5000, 0)
    row.view(np.uint32)[place] = bits
    assert _native.row_max(row)[2]
    assert _native.row_max_reference(row)[2]


def test_infinities_are_not_nans() -> None:
    row = row_of(100, 0)
    row[3], row[70] = -np.inf, np.inf
    assert _native.row_max(row) == (np.inf, 70, False)
    assert _native.row_max(np.full(40, -np.inf, np.float32)) == (-np.inf, 0, False)


@pytest.mark.parametrize("temperature", [1e-30, 0.3, 1.0, 7.5])
@pytest.mark.parametrize("size", SIZES)
def test_softmax_weights_equal_their_reference(size: int, temperature: float) -> None:
    row = tied_row(size, 1) + row_of(size, 2, 0.1)
    largest = _native.row_max(row)[0]
    weights = _native.softmax_weights(row, largest, temperature)
    want = _native.softmax_weights_reference(row, largest, temperature)
    # Single-precision rounding of distance / temperature, at most 87, is worth 87 * 2^-24 in the exponent.
    np.testing.assert_allclose(weights, want, rtol=87 * 2**-24 + 2**-21, atol=2e-38)
    assert weights[_native.row_max(row)[1]] == 1


@pytest.mark.parametrize("size", SIZES)
def test_log_sum_exp_equals_its_reference_and_numpy(size: int) -> None:
    row = tied_row(size, 3)
    largest = _native.row_max(row)[0]
    want = np.log(np.exp(row.astype(np.float64) - largest).sum())
    assert _native.log_sum_exp(row, largest) == pytest.approx(want, abs=1e-6)
    assert _native.log_sum_exp_reference(row, largest) == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("size", SIZES)
def test_cutoff_by_count_equals_its_reference(size: int) -> None:
    for row in (row_of(size, 4), tied_row(size, 5), np.zeros(size, np.float32)):
        largest = _native.row_max(row)[0]
        for count in {1, 2, 5, 50, size // 32, size // 2, size - 1, size}:
            if 1 <= count <= size:
                want = _native.cutoff_by_count_reference(row, largest, count)
                assert _native.cutoff_by_count(row, largest, count) == want


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("size", SIZES)
def test_cutoff_by_mass_equals_its_reference(size: int, temperature: float) -> None:
    rows = [row_of(size, 6), row_of(size, 6, 0.01), row_of(size, 6, 30), tied_row(size, 7), np.zeros(size, np.float32)]
    for row in rows:
        largest = _native.row_max(row)[0]
        weights = _native.softmax_weights(row, largest, temperature)
        for share in (1e-6, 0.1, 0.5, 0.7, 0.9, 0.99):
            share = float(np.float32(share))
            distance, token = _native.cutoff_by_mass(row, weights, largest, temperature, share)
            want = _native.cutoff_by_mass_reference(row, weights, largest, share)
            if (distance, token) == want:
                continue
            # Sums in another order may differ in the last places where a sum meets the share exactly.
            kept = mass_kept(row, weights, largest, (distance, token))
            assert kept == pytest.approx(mass_kept(row, weights, largest, want), rel=2e-5)
            assert abs(kept - share * weights.sum(dtype=np.float64)) < 2e-5 * weights.sum() + 1


def mass_kept(row: np.ndarray, weights: np.ndarray, largest: float, cutoff: tuple[float, int]) -> float:
    distance = np.float32(largest) - row
    kept = (distance < cutoff[0]) | ((distance == cutoff[0]) & (np.arange(len(row)) <= cutoff[1]))
    return float(weights[kept].sum(dtype=np.float64))


def test_cutoff_by_mass_survives_a_share_next_to_one() -> None:
    row = row_of(49152, 8, 0.001)
    weights = _native.softmax_weights(row, row.max(), 1.0)
    distance, _ = _native.cutoff_by_mass(row, weights, row.max(), 1.0, float(np.nextafter(np.float32(1), 0)))
    assert (row.max() - row <= distance).mean() > 0.99


@pytest.mark.parametrize("size", SIZES)
def test_draw_equals_its_reference_and_never_draws_weight_zero(size: int) -> None:
    rng = np.random.default_rng(9)
    weights = rng.random(size).astype(np.float32)
    weights[rng.random(size) < 0.5] = 0
    weights[rng.integers(size)] = 1
    cumulative = np.cumsum(weights.astype(np.float64))
    for uniform in [0.0, np.nextafter(1, 0), *rng.random(200)]:
        token = _native.draw(weights, uniform)
        assert weights[token] > 0
        target = uniform * cumulative[-1]
        slack = 1e-6 * cumulative[-1]
        assert cumulative[token] - weights[token] - slack <= target <= cumulative[token] + slack
        reference = _native.draw_reference(weights, uniform)
        assert abs(cumulative[token] - cumulative[reference]) <= weights[token] + weights[reference] + slack


def test_philox_matches_the_published_answers() -> None:
    # Known-answer vectors of the Random123 distribution for philox4x32-10.
    assert _native.philox4x32([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = 0xFFFFFFFF
    assert _native.philox4x32([ones] * 4, [ones] * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    counter = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]
    assert _native.philox4x32(counter, [0xA4093822, 0x299F31D0]) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


def test_uniforms_fill_the_unit_interval_and_neighbouring_seeds_are_unrelated() -> None:
    draws = np.array([[_native.uniform_at(seed, position) for position in range(200)] for seed in range(200)])
    assert draws.min() >= 0
    assert draws.max() < 1
    counts = np.histogram(draws, 100, (0, 1))[0]
    assert ((counts - 400) ** 2 / 400).sum() < 160  # chi-square, 99 degrees of freedom: p > 1e-4
    assert np.abs(np.corrcoef(draws) - np.eye(200)).max() < 0.35  # 5 sigma of 1/sqrt(200)


def row_state(vocab: int = 8, **change: Any) -> _native.RowState:
    none = {
        "bias_ids": np.empty(0, np.int32),
        "bias_values": np.empty(0, np.float32),
        "stop_ids": np.empty(0, np.int32),
    }
    return _native.RowState(vocab, **({"temperature": 1.0} | none | change))


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bias_ids": ids(1), "bias_values": np.ones(2, np.float32)}, "bias_values: length 2, want 1"),
        ({"bias_ids": ids(8), "bias_values": np.ones(1, np.float32)}, r"bias_ids: ids must be in \[0, 8\)"),
        ({"stop_ids": ids(8)}, r"stop_ids: ids must be in \[0, 8\)"),
        ({"stop_ids": ids(-1)}, "stop_ids: ids"),
        ({"temperature": -1.0}, "sampling parameters"),
        ({"temperature": np.nan}, "sampling parameters"),
        ({"top_p": 0.0}, "sampling parameters"),
        ({"num_logprobs": 9}, "sampling parameters"),
    ],
)
def test_a_row_refuses_bad_shapes_ids_and_ranges(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        row_state(**change)


def test_a_row_refuses_tokens_it_does_not_have() -> None:
    state = row_state()
    with pytest.raises(ValueError, match=r"prompt: ids must be in \[0, 8\)"):
        state.remember(ids(3, 8))
    for token in (-1, 8):
        with pytest.raises(ValueError, match=r"must be in \[0, 8\)"):
            state.accept(token)
    assert state.position == 0
    assert state.seen_ids.tolist() == []


@pytest.mark.parametrize("states", [1, 3])
def test_every_row_needs_a_state_of_its_own(states: int) -> None:
    with pytest.raises(ValueError, match=f"2 rows of logits for {states} states"):
        _native.sample_rows(np.zeros((2, 8), np.float32), [row_state() for _ in range(states)])


def test_a_row_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="row 1: logits have 8 columns, its state 9"):
        _native.sample_rows(np.zeros((2, 8), np.float32), [row_state(8), row_state(9)])


def test_the_binding_refuses_other_types_instead_of_converting() -> None:
    with pytest.raises(TypeError):
        _native.sample_rows(np.zeros((1, 8), np.float64), [row_state()])
    with pytest.raises(TypeError, match="every item must be a RowState"):
        _native.sample_rows(np.zeros((1, 8), np.float32), [object()])
    with pytest.raises(TypeError):
        row_state(stop_ids=np.zeros(2, np.int64))


def test_no_rows_is_no_work() -> None:
    assert _native.sample_rows(np.zeros((0, 8), np.float32), []) == ([], [], None)


def test_a_row_that_fails_is_named_with_its_reason() -> None:
    logits = np.zeros((3, 8), np.float32)
    logits[1, 5] = np.nan
    states = [row_state() for _ in logits]
    assert _native.sample_rows(logits, states)[2] == (1, _native.STATUS_NAN)
    logits[1] = -np.inf
    assert _native.sample_rows(logits, states)[2] == (1, _native.STATUS_EMPTY)


def words_of(allowed: np.ndarray) -> np.ndarray:
    """[M, V] bool as [M, ceil(V/32)] uint32."""
    padded = np.zeros((len(allowed), -(-allowed.shape[1] // 32) * 32), np.bool_)
    padded[:, : allowed.shape[1]] = allowed
    return np.packbits(padded, axis=1, bitorder="little").view(np.uint32)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_mask_is_a_row_whose_other_tokens_are_minus_infinity(size: int, temperature: float) -> None:
    rng = np.random.default_rng(size)
    logits = np.stack([row_of(size, seed) for seed in range(4)])
    allowed = rng.random((3, size)) < 0.3
    allowed[:, rng.integers(size)] = True
    mask_of = np.array([2, -1, 0, 1], np.int32)
    edited = logits.copy()
    for row, mask in enumerate(mask_of):
        if mask >= 0:
            edited[row, ~allowed[mask]] = -np.inf

    def states() -> list[Any]:
        return [row_state(size, temperature=temperature, top_p=0.9, seed=row) for row in range(4)]

    tokens, _, failure = _native.sample_rows(logits, states(), words_of(allowed), mask_of)
    assert failure is None
    assert tokens == _native.sample_rows(edited, states())[0]
    assert logits.max() > -np.inf


def test_bits_beyond_the_vocabulary_mean_nothing() -> None:
    logits = np.zeros((1, 40), np.float32)
    words = np.array([[0, 0xFFFFFF00]], np.uint32)
    assert _native.sample_rows(logits, [row_state(40)], words, np.zeros(1, np.int32))[2] == (0, _native.STATUS_EMPTY)


@pytest.mark.parametrize(
    ("masks", "mask_of", "message"),
    [
        (np.zeros((1, 2), np.uint32), np.zeros(2, np.int32), "2 words a row, want 1"),
        (np.zeros((1, 1), np.uint32), np.zeros(1, np.int32), "mask_of: length 1, want 2"),
        (np.zeros((1, 1), np.uint32), np.array([0, 1], np.int32), "row 1 names mask 1 of 1"),
        (np.zeros((1, 1), np.uint32), np.array([-2, 0], np.int32), "row 0 names mask -2 of 1"),
        (np.zeros((1, 1), np.uint32), None, "given together"),
    ],
)
def test_masks_that_do_not_fit_are_refused(masks: Any, mask_of: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _native.sample_rows(np.zeros((2, 8), np.float32), [row_state(8), row_state(8)], masks, mask_of)
