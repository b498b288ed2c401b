"""Packed codes byte by byte, and that nothing is lost."""

import numpy as np
import pytest

from optimc.plan.cpu_program import IntWeight
from optimc_passes.emit.cpu.pack_int import fits_float16, pack_int, packed_int_bytes, refine_groups
from optimc_passes.emit.cpu.panels import gated_rows, panel_rows


def weight(rng, outputs, features, group, bits, zeros):
    groups = -(-features // group)
    codes = rng.integers(0, 1 << bits, (outputs, features)).astype(np.uint8)
    scales = rng.integers(1, 64, (outputs, groups)).astype(np.float32) / 64
    return codes, scales, rng.integers(0, 1 << bits, (outputs, groups)).astype(np.uint8) if zeros else None


def test_four_bits_hold_feature_j_low_and_four_plus_j_high():
    codes = np.zeros((32, 8), np.uint8)
    codes[0] = [1, 2, 3, 4, 5, 6, 7, 8]
    codes[17, 5] = 15
    packed = pack_int(codes, np.full((32, 1), 2, np.float32), None, bits=4, group=8, rows=panel_rows(32), wide=False)
    assert len(packed) == 64 + 128
    np.testing.assert_array_equal(packed[:64].view(np.float16), np.full(32, 2))
    assert packed[64:68].tolist() == [0x51, 0x62, 0x73, 0x84]
    assert packed[64 + 64 + 4 : 64 + 64 + 8].tolist() == [0, 0xF0, 0, 0]
    assert np.count_nonzero(packed[64:]) == 5


def test_eight_bits_hold_four_features_of_sixteen_rows_together():
    codes = np.zeros((32, 8), np.uint8)
    codes[1] = [11, 12, 13, 14, 15, 16, 17, 18]
    zeros = np.arange(32, dtype=np.uint8)[:, None]
    packed = pack_int(codes, np.ones((32, 1), np.float32), zeros, bits=8, group=8, rows=panel_rows(32), wide=True)
    assert len(packed) == 128 + 32 + 256
    np.testing.assert_array_equal(packed[:128].view(np.float32), np.ones(32))
    np.testing.assert_array_equal(packed[128:160], np.arange(32))
    blocks = packed[160:].reshape(4, 16, 4)
    assert blocks[0, 1].tolist() == [11, 12, 13, 14]
    assert blocks[2, 1].tolist() == [15, 16, 17, 18]
    assert blocks.sum() == codes.sum()


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("outputs", "features", "group"), [(32, 64, 32), (70, 96, 32), (33, 100, 64), (5, 44, 12), (64, 9, 9)]
)
def test_unpacking_gives_the_weight(interpret, outputs, features, group, bits, zeros, wide):
    codes, scales, zero_points = weight(np.random.default_rng(1), outputs, features, group, bits, zeros)
    order = panel_rows(outputs)
    packed = pack_int(codes, scales, zero_points, bits=bits, group=group, rows=order, wide=wide)
    assert len(packed) == packed_int_bytes(len(order) // 32, features, group, bits, zeros=zeros, wide=wide)
    entry = IntWeight(
        tensor="t",
        outputs=outputs,
        features=features,
        group=group,
        bits=bits,
        zeros=zeros,
        wide_scales=wide,
        zero_point=3,
    )
    spread = np.arange(features) // group
    expected = (codes - (3.0 if zero_points is None else zero_points[:, spread].astype(np.float32))) * scales[:, spread]
    unpacked = interpret.unpack_int(entry, packed)
    np.testing.assert_array_equal(unpacked[:outputs], expected)
    assert not unpacked[outputs:].any()


def test_gate_and_up_panels_alternate_each_padded_to_whole_panels():
    rows = gated_rows(40, gate=40, up=0).reshape(4, 32)
    assert rows[0].tolist() == list(range(40, 72))
    assert rows[1].tolist() == list(range(32))
    assert rows[2].tolist() == [*range(72, 80), *[-1] * 24]
    assert rows[3].tolist() == [*range(32, 40), *[-1] * 24]


def test_smaller_groups_repeat_what_they_came_from():
    parts = np.array([[1, 2, 3]])
    assert refine_groups(parts, features=40, group=16, finer=8).tolist() == [[1, 1, 2, 2, 3]]
    assert refine_groups(parts, features=40, group=16, finer=16).tolist() == [[1, 2, 3]]


@pytest.mark.parametrize(
    ("scale", "fits"), [(0.5, True), (65504.0, True), (2**-24, True), (0.1, False), (1e5, False), (2**-25, False)]
)
def test_scales_are_float16_only_if_exactly_so(scale, fits):
    assert fits_float16(np.array([[1.0, scale]], np.float32)) is fits
