"""Scales of a KV cache, by hand and by their bounds."""

from __future__ import annotations

import numpy as np
import pytest

from optimc_passes.quantize.kv_ranges import (
    KeyRange,
    Turning,
    assumed_scales,
    bytes_per_token,
    round_by_channel,
    round_by_token,
)


def seen(keys):
    ranges = KeyRange()
    ranges.see(np.asarray(keys, np.float32))
    return ranges


def test_int8_scales_are_the_largest_magnitude_over_127_and_int4_spans_the_range():
    ranges = seen([[[1.0, -254.0], [-2.0, 100.0]]])
    ranges.see(np.array([[[0.5, 10.0]]], np.float32))
    int8, int4 = ranges.scales("int8"), ranges.scales("int4")
    np.testing.assert_allclose(int8.scales, [[2 / 127, 2.0]], rtol=1e-6)
    assert int8.minimums is None
    np.testing.assert_allclose(int4.scales, [[3 / 15, 354 / 15]], rtol=1e-6)
    np.testing.assert_array_equal(int4.minimums, [[-2.0, -254.0]])


def test_a_channel_at_rest_keeps_a_usable_scale():
    keys = np.zeros((2, 5, 3), np.float32)
    keys[0, :, 0] = [127, -127, 3, 4, 5]
    for dtype in ("int8", "int4"):
        scales = seen(keys).scales(dtype).scales
        assert (scales > 0).all()
        assert np.isfinite(scales).all()
        assert scales[0, 1] == pytest.approx(scales[0, 0] / 1024)
        assert (scales[1] == 1).all()


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_key_that_is_not_finite_is_refused(poison):
    keys = np.ones((1, 4, 2), np.float32)
    keys[0, 2, 1] = poison
    with pytest.raises(ValueError, match="not finite"):
        seen(keys)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_what_was_seen_reads_back_within_half_a_step_and_what_lies_beyond_as_the_limit(dtype):
    keys = np.random.default_rng(0).normal(size=(2, 50, 8)).astype(np.float32) * np.logspace(-1, 1, 8, dtype=np.float32)
    ranges = seen(keys)
    by = ranges.scales(dtype)
    assert (np.abs(round_by_channel(keys, by, dtype) - keys) <= by.scales[:, None] * 0.5001).all()
    high = np.abs(keys).max(axis=1) if dtype == "int8" else keys.max(axis=1)
    beyond = round_by_channel(3 * np.abs(high)[:, None] + high[:, None], by, dtype)
    np.testing.assert_allclose(beyond[:, 0], high, rtol=1e-5)


@pytest.mark.parametrize(("dtype", "steps"), [("int8", 254), ("int4", 15)])
def test_a_token_is_rounded_with_its_own_scale(dtype, steps):
    rows = np.random.default_rng(1).normal(size=(3, 4, 16)).astype(np.float32)
    rows[0, 0] = 0
    rows[1] *= 1000
    span = 2 * np.abs(rows).max(-1) if dtype == "int8" else rows.max(-1) - rows.min(-1)
    error = np.abs(round_by_token(rows, dtype) - rows)
    assert (error <= span[..., None] / steps * 0.5001).all()
    assert error.max() > 0
    assert (round_by_token(rows, dtype)[0, 0] == 0).all()


def test_channels_that_differ_are_better_off_with_scales_of_their_own():
    """What the choice between the two is about: one channel 50 times the others."""
    keys = np.random.default_rng(2).normal(size=(1, 200, 32)).astype(np.float32)
    keys[..., 3] += 50
    for dtype in ("int8", "int4"):
        by_channel = np.abs(round_by_channel(keys, seen(keys).scales(dtype), dtype) - keys)[..., 4:].mean()
        by_token = np.abs(round_by_token(keys, dtype) - keys)[..., 4:].mean()
        assert by_token > 5 * by_channel


def test_a_pair_that_turns_slowly_is_followed_beyond_the_window_and_no_further():
    keys = np.zeros((1, 4, 4), np.float32)
    keys[..., 0] = 10  # pair (0, 2) turns by 0.01 a position, pair (1, 3) around within the window
    keys[..., 1] = 7
    for served, reach in ((4, 0.0), (54, np.sin(0.5)), (10_000, 1.0)):
        ranges = KeyRange(Turning(np.array([0.01, 2.0]), 4, served))
        ranges.see(keys)
        scales = ranges.scales("int8").scales[0]
        assert 127 * scales[0] == pytest.approx(10)
        assert 127 * scales[2] == pytest.approx(10 * max(reach, 1 / 1024), rel=0.02)
        assert 127 * scales[3] == pytest.approx(10 / 1024)
        int4 = ranges.scales("int4")
        assert int4.minimums[0, 0] == pytest.approx(10 * np.cos(min(0.01 * (served - 4), np.pi)), rel=0.02)


def test_assumed_scales_hold_sixteen():
    int8, int4 = assumed_scales(2, 3, "int8"), assumed_scales(2, 3, "int4")
    assert int8.scales.shape == (2, 3)
    np.testing.assert_allclose(127 * int8.scales, 16)
    assert int4.minimums is not None
    np.testing.assert_allclose(int4.minimums + 15 * int4.scales, 16)


def test_bytes_of_a_token_by_hand():
    assert bytes_per_token(3, 64, 32, channel_keys=False) == 3 * 2 * 64 * 4
    assert bytes_per_token(3, 64, 16, channel_keys=False) == 3 * 2 * 64 * 2
    assert bytes_per_token(3, 64, 8, channel_keys=False) == 3 * (128 + 8)
    assert bytes_per_token(3, 64, 8, channel_keys=True) == 3 * (128 + 4)
    assert bytes_per_token(3, 64, 4, channel_keys=False) == 3 * (64 + 16)
    assert bytes_per_token(3, 64, 4, channel_keys=True) == 3 * (64 + 8)
