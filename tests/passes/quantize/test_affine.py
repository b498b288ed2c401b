import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from optimc_passes.quantize.affine import float16_neighbours, group_range, quantize_affine


def dequantize(result, bits, group):
    groups = np.arange(result.codes.shape[1]) // group
    zeros = 2 ** (bits - 1) if result.zeros is None else result.zeros[:, groups].astype(np.float64)
    return (result.codes.astype(np.float64) - zeros) * result.scales[:, groups].astype(np.float64)


def test_asymmetric_four_bits_by_hand():
    # Range -1 .. 2 in 15 steps of 0.2: zero point 1 / 0.2 = 5.
    weight = np.array([[-1, 2, 0, 0.45, -0.35]], np.float32)
    codes, scales, zeros = quantize_affine(weight, 4, 5, symmetric=False)
    assert scales.tolist() == [[np.float16(0.2)]]
    assert zeros.tolist() == [[5]]
    assert codes.tolist() == [[0, 15, 5, 7, 3]]


def test_symmetric_four_bits_by_hand():
    # Largest 1.4 over 7 steps and smallest -1 over 8: the scale is 0.2, codes are offset by 8.
    weight = np.array([[1.4, -1, 0, 0.31]], np.float32)
    codes, scales, zeros = quantize_affine(weight, 4, 4, symmetric=True)
    assert scales.tolist() == [[np.float16(0.2)]]
    assert zeros is None
    assert codes.tolist() == [[15, 3, 8, 10]]


def test_symmetric_uses_the_extra_code_below_zero():
    codes, scales, _ = quantize_affine(np.array([[-1.6, 0.2]], np.float32), 4, 2, symmetric=True)
    assert scales.tolist() == [[np.float16(0.2)]]
    assert codes.tolist() == [[0, 9]]


def test_eight_bits_by_hand():
    codes, scales, zeros = quantize_affine(np.array([[0, 25.5, 12.8]], np.float32), 8, 3, symmetric=False)
    assert scales.tolist() == [[np.float16(0.1)]]
    assert zeros.tolist() == [[0]]
    assert codes.tolist() == [[0, 255, 128]]


def test_groups_run_along_columns_and_the_last_is_ragged():
    weight = np.array([[1, -1, 10, -10, 100]], np.float32)
    low, high = group_range(weight, 2)
    assert low.tolist() == [[-1, -10, 0]]
    assert high.tolist() == [[1, 10, 100]]
    result = quantize_affine(weight, 8, 2, symmetric=False)
    assert result.scales.shape == result.zeros.shape == (1, 3)


@pytest.mark.parametrize("symmetric", [True, False])
def test_an_all_zero_group_gets_a_usable_scale_and_stays_zero(symmetric):
    weight = np.zeros((2, 8), np.float32)
    weight[1, 4:] = 3
    result = quantize_affine(weight, 4, 4, symmetric=symmetric)
    assert result.scales[0].tolist() == [1, 1]
    assert np.array_equal(dequantize(result, 4, 4)[0], np.zeros(8))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_an_element_that_is_not_finite_is_refused_with_its_row(bad):
    weight = np.ones((4, 6), np.float32)
    weight[2, 5] = bad
    with pytest.raises(ValueError, match="1 rows have elements that are not finite, the first is row 2"):
        quantize_affine(weight, 4, 4, symmetric=False)


FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=200, deadline=None)
@given(
    weight=hnp.arrays(np.float32, st.tuples(st.integers(0, 4), st.integers(0, 23)), elements=FINITE),
    bits=st.integers(2, 8),
    group=st.integers(1, 30),
    symmetric=st.booleans(),
)
def test_any_finite_weight_comes_back_within_half_a_scale(weight, bits, group, symmetric):
    result = quantize_affine(weight, bits, group, symmetric=symmetric)
    num_groups = -(-weight.shape[1] // group)
    assert result.codes.shape == weight.shape
    assert result.scales.shape == (weight.shape[0], num_groups)
    assert result.codes.max(initial=0) < 2**bits
    assert np.isfinite(result.scales).all()
    assert (result.scales >= np.finfo(np.float32).tiny).all()
    assert (result.zeros is None) == symmetric
    if not symmetric:
        assert result.zeros.max(initial=0) < 2**bits
    scales = result.scales[:, np.arange(weight.shape[1]) // group].astype(np.float64)
    error = np.abs(dequantize(result, bits, group) - weight)
    # float32 division rounds: up to 2**bits steps, each known to 2**-23 relative.
    assert (error <= scales * (0.5 + 2.0**bits * 2**-22)).all()


@settings(max_examples=100, deadline=None)
@given(
    weight=hnp.arrays(np.float32, (3, 12), elements=FINITE),
    group=st.integers(1, 12),
    symmetric=st.booleans(),
)
def test_zero_is_exact(weight, group, symmetric):
    weight[:, ::3] = 0
    result = quantize_affine(weight, 4, group, symmetric=symmetric)
    assert not dequantize(result, 4, group)[:, ::3].any()


def test_an_outlier_spoils_its_own_group_only():
    weight = np.random.default_rng(0).standard_normal((1, 128)).astype(np.float32)
    calm = quantize_affine(weight, 4, 32, symmetric=False)
    weight[0, 40] = 1e4
    wild = quantize_affine(weight, 4, 32, symmetric=False)
    same = np.arange(4) != 1
    assert np.array_equal(calm.scales[:, same], wild.scales[:, same])
    assert wild.scales[0, 1] > 100 * calm.scales[0, 1]


def is_float16(scales):
    return np.array_equal(scales.astype(np.float16).astype(np.float32), scales)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_scales_are_float16_numbers_and_codes_belong_to_them(bits, symmetric):
    weight = np.random.default_rng(1).standard_normal((64, 128)).astype(np.float32)
    result = quantize_affine(weight, bits, 32, symmetric=symmetric)
    assert is_float16(result.scales)
    groups = np.arange(128) // 32
    zeros = 2 ** (bits - 1) if symmetric else result.zeros[:, groups]
    nearest = np.clip(np.rint(weight / result.scales[:, groups]) + zeros, 0, 2**bits - 1)
    assert np.array_equal(result.codes, nearest)


def test_a_scale_outside_float16_leaves_all_scales_of_the_weight_as_they_were():
    weight = np.random.default_rng(1).standard_normal((4, 64)).astype(np.float32)
    small, large = weight.copy(), weight.copy()
    small[2, 32:] *= 1e-5  # scales of about 2e-6: below the normal range, which ends at 6.1e-5
    large[2, 32:] *= 1e6
    for touched in (small, large):
        scales = quantize_affine(touched, 4, 32, symmetric=True).scales
        low, high = group_range(touched, 32)
        assert np.array_equal(scales, np.maximum(high / np.float32(7), -low / np.float32(8)))
        assert not is_float16(np.delete(scales, 2, axis=0))


def test_neighbours_enclose_what_float16_cannot_hold():
    step = np.float32(2**-10)  # between 1 and 2
    exact = np.array([1, 1 + 0.25 * step, 1 + 0.75 * step, 65504], np.float32)
    nearest, above = float16_neighbours(exact)
    assert nearest.tolist() == [1, 1, 1 + step, 65504]
    assert above.tolist() == [1, 1 + step, 1 + step, 65504]
    assert nearest.dtype == above.dtype == np.float32


def test_a_scale_is_rounded_up_where_down_would_clip_the_largest_element():
    # 255 steps of 1.0004, which float16 rounds down to 1. The zero point is rounded up to 101: nearly half a step.
    low, span = -100.55, 255 * 1.0004
    weight = np.array([[low, low + span]], np.float32)
    result = quantize_affine(weight, 8, 2, symmetric=False)
    assert result.scales.tolist() == [[1 + 2**-10]]
    assert np.abs(dequantize(result, 8, 2) - weight).max() <= 0.5 * (1 + 2**-10)
    # Where the zero point leaves room, rounding down harms nobody and is nearer.
    assert quantize_affine(np.array([[-100, -100 + span]], np.float32), 8, 2, symmetric=False).scales.tolist() == [[1]]
