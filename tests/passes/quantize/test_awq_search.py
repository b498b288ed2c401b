"""The search for channel scales and clipped ranges: finite on hostile inputs, never worse than doing nothing."""

import numpy as np
import pytest

from optimc_passes.quantize import awq_search
from optimc_passes.quantize.affine import encode, grid_of, group_range, quantize_affine
from optimc_passes.quantize.awq_search import LARGEST, SMALLEST, best_scales, scales_of
from optimc_passes.quantize.clip import best_clip, group_blocks
from optimc_passes.quantize.rounding import nearest, output_error

RNG = np.random.default_rng(11)


def activations(tokens=256, columns=64, loud=(3, 17, 40), factor=30.0):
    """Tokens of which a few channels are much louder than the rest."""
    x = np.random.default_rng(1).standard_normal((tokens, columns)).astype(np.float32)
    x[:, list(loud)] *= factor
    return x


def search(x, weights, group=16, bits=4, symmetric=False, **options):
    rounders = [nearest(bits, group, symmetric=symmetric)] * len(weights)
    return best_scales(weights, x.T @ x, np.abs(x).mean(axis=0), rounders, **options)


def weights_of(columns=64, rows=(48, 24), seed=2):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((count, columns)).astype(np.float32) for count in rows]


def dequantized(weight, bits=4, group=16, symmetric=False):
    codes, scales, zeros = quantize_affine(weight, bits, group, symmetric=symmetric)
    spread = np.arange(weight.shape[1]) // group
    offsets = np.float32(2 ** (bits - 1)) if zeros is None else zeros[:, spread].astype(np.float32)
    return (codes.astype(np.float32) - offsets) * scales[:, spread]


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("group", [16, 64, 20])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_the_rounder_gives_what_the_codes_stand_for(bits, group, symmetric):
    (weight,) = weights_of(rows=(24,))
    rounded = nearest(bits, group, symmetric=symmetric)(weight)
    np.testing.assert_array_equal(rounded, dequantized(weight, bits, group, symmetric))


def test_loud_channels_make_scaling_worth_it_and_the_error_is_the_outputs():
    x, weights = activations(), weights_of()
    found = search(x, weights)
    assert found.error < 0.6 * found.error_unscaled
    assert found.scales[[3, 17, 40]].min() > np.median(found.scales)
    measured = sum(
        float(np.square(x @ (dequantized(w * found.scales) / found.scales - w).T, dtype=np.float64).sum())
        for w in weights
    )
    assert found.error == pytest.approx(measured, rel=1e-3)
    unscaled = sum(float(np.square(x @ (dequantized(w) - w).T, dtype=np.float64).sum()) for w in weights)
    assert found.error_unscaled == pytest.approx(unscaled, rel=1e-3)


def test_where_no_candidate_is_better_nothing_is_scaled():
    # Weights on their own grid are rounded without error as they are, and with error once scaled.
    (weight,) = weights_of(rows=(32,))
    found = search(activations(), [dequantized(weight)])
    assert found.error_unscaled == pytest.approx(0, abs=1e-6)
    np.testing.assert_array_equal(found.scales, np.ones(64))


@pytest.mark.parametrize("duo", [False, True])
def test_zero_negative_and_1e5_channels_give_finite_positive_scales(duo):
    x = activations()
    x[:, 5] = 0
    x[:, 9] = -np.abs(x[:, 9]) - 1
    x[:, 11] *= 1e5
    found = search(x, weights_of(), duo=duo)
    assert np.isfinite(found.scales).all()
    assert (found.scales >= SMALLEST).all()
    assert (found.scales <= LARGEST).all()
    assert np.isfinite(found.error)
    assert found.error <= found.error_unscaled
    # Every candidate, not only the one that won.
    magnitude = np.abs(x).mean(axis=0)
    for ratio in np.linspace(0, 1, 21):
        for sizes in (None, np.zeros(64, np.float32), magnitude):
            scales = scales_of(magnitude, sizes, float(ratio), np.arange(64))
            assert np.isfinite(scales).all()
            assert (scales >= SMALLEST * 0.999).all()
            assert (scales <= LARGEST * 1.001).all()


def test_a_channel_of_negative_mean_counts_by_its_size():
    x = activations(loud=())
    x[:, 9] = -30 - np.abs(x[:, 9])
    x[:, 10] = 30 + np.abs(x[:, 10])
    found = search(x, weights_of())
    assert found.scales[9] == pytest.approx(found.scales[10], rel=0.1)
    assert found.scales[9] > 2 * np.median(found.scales)


def test_a_zero_group():
    weights = weights_of()
    weights[0][:, 16:32] = 0
    weights[1][:] = 0
    found = search(activations(), weights)
    assert np.isfinite(found.scales).all()
    assert (found.scales > 0).all()
    assert found.error <= found.error_unscaled


def test_all_inputs_zero_leave_everything_as_it_is():
    found = search(np.zeros((8, 64), np.float32), weights_of())
    np.testing.assert_array_equal(found.scales, np.ones(64))
    assert found.error == found.error_unscaled == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_inputs_that_are_not_finite_are_an_error(bad):
    x = activations()
    x[3, 7] = bad
    with pytest.raises(ValueError, match="not finite"), np.errstate(invalid="ignore"):
        search(x, weights_of())
    weights = weights_of()
    weights[1][0, 0] = bad
    with pytest.raises(ValueError, match="a weight is not finite"):
        search(activations(), weights)


@pytest.mark.parametrize("channels", [64, 32, 16], ids=["4/4", "4/2", "4/1"])
def test_features_of_one_channel_get_one_scale(channels):
    # 4 query heads of 16 features; 4, 2 or 1 key/value heads.
    repeat = 64 // channels
    heads = np.arange(64) // 16 // repeat
    of = heads * 16 + np.arange(64) % 16
    assert of.max() + 1 == channels
    found = search(activations(), weights_of(), channels=of)
    for channel in range(channels):
        assert len(set(found.scales[of == channel].tolist())) == 1
    assert found.error < found.error_unscaled


def test_a_finer_grid_is_no_worse():
    x, weights = activations(), weights_of()
    errors = [search(x, weights, grid=grid, duo=duo).error for grid, duo in ((5, False), (20, False), (20, True))]
    assert errors[0] >= errors[1] >= errors[2]


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("group", [16, 24])
def test_clipped_ranges_lower_the_error_of_each_group_by_its_own_inputs(group, symmetric):
    x = activations(columns=64)
    (weight,) = weights_of(rows=(40,), seed=4)
    weight[::3, ::7] *= 4  # outliers that are worth cutting off where their inputs are quiet
    moment = x.T @ x
    blocks = group_blocks(moment, group)
    low, high = best_clip(weight, blocks, 3, group, symmetric=symmetric)
    assert low.shape == high.shape == (40, -(-64 // group))

    def errors(low, high):
        scales, zeros = grid_of(low, high, 3, symmetric=symmetric)
        spread = np.arange(64) // group
        offsets = np.float32(4) if zeros is None else zeros[:, spread].astype(np.float32)
        codes = encode(weight, scales, zeros, 3, group)
        difference = (codes.astype(np.float32) - offsets) * scales[:, spread] - weight
        parts = [difference[:, at : at + group] for at in range(0, 64, group)]
        return np.array([[d @ h @ d for d in part] for part, h in zip(parts, blocks, strict=True)])

    whole = errors(*group_range(weight, group))
    clipped = errors(low, high)
    assert (clipped <= whole * 1.001 + 1e-6).all()
    assert (clipped < 0.9 * whole).mean() > 0.3
    assert (low >= group_range(weight, group)[0]).all()
    assert (high <= group_range(weight, group)[1]).all()


def test_the_output_error_is_that_of_the_tokens():
    x, difference = activations(), RNG.standard_normal((8, 64)).astype(np.float32)
    assert output_error(difference, x.T @ x) == pytest.approx(np.square(x @ difference.T).sum(), rel=1e-3)


def test_a_sample_of_rows_finds_scales_nearly_as_good_as_all_rows(monkeypatch: pytest.MonkeyPatch):
    x, weights = activations(), weights_of(rows=(1024, 512))
    sampled = search(x, weights)
    monkeypatch.setattr(awq_search, "_ROWS", 1 << 30)
    exhaustive = search(x, weights)
    assert exhaustive.error <= sampled.error <= 1.01 * exhaustive.error
