"""Weights in the checkpoint's own dtype, transposed without a copy, codes unsigned whatever ONNX makes of them."""

import ml_dtypes
import numpy as np
import pytest

from optimc_passes.emit.cpu.stored import read_codes, read_stored, stored_dtype, table_bits
from optimc_passes.graph.weight_expression import (
    Codes,
    Concat,
    Param,
    Scaled,
    Scales,
    Shifted,
    TableCodes,
    Transposed,
    Zeros,
)
from optimc_passes.graph.weight_tensor import WeightTensor
from optimc_passes.weights import Dense, Quantized


def dense(dtype, rows=3):
    return Dense.of(np.arange(rows * 4).reshape(rows, 4).astype(dtype))


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [
        (np.float32, np.float32),
        (ml_dtypes.bfloat16, ml_dtypes.bfloat16),
        (np.float16, np.float16),
        (ml_dtypes.float8_e4m3fn, np.float32),
    ],
)
def test_a_dense_weight_keeps_its_dtype_if_kernels_read_it(dtype, kept):
    store = {"w": dense(dtype)}
    tensor = WeightTensor(Transposed(Param("w")), store)
    assert stored_dtype(tensor) == kept
    assert read_stored(tensor).dtype == kept
    np.testing.assert_array_equal(read_stored(tensor).astype(np.float32), tensor.numpy())


def test_a_transposed_read_and_its_concatenation_lie_as_the_checkpoint_does():
    store = {"a": dense(np.float32), "b": dense(np.float32, rows=5)}
    tensor = WeightTensor(Concat((Transposed(Param("a")), Transposed(Param("b"))), axis=1), store)
    array = read_stored(tensor)
    assert array.T.flags.c_contiguous
    np.testing.assert_array_equal(array, tensor.numpy())


def test_parts_of_different_dtypes_meet_in_float32():
    store = {"a": dense(np.float16), "b": dense(ml_dtypes.bfloat16)}
    tensor = WeightTensor(Concat((Transposed(Param("a")), Transposed(Param("b"))), axis=1), store)
    assert stored_dtype(tensor) == np.float32
    np.testing.assert_array_equal(read_stored(tensor), tensor.numpy())


@pytest.mark.parametrize(
    ("expression", "kept"),
    [
        (Scaled(Param("a"), 0.5), ml_dtypes.bfloat16),
        (Scaled(Transposed(Param("a")), -4.0), ml_dtypes.bfloat16),
        (Scaled(Param("a"), 0.1), np.float32),
        (Shifted(Param("a"), 1.0), np.float32),
        (Concat((Scaled(Param("a"), 0.5), Param("a")), 0), ml_dtypes.bfloat16),
        (Concat((Scaled(Param("a"), 0.1), Param("a")), 0), np.float32),
        (Concat((Param("a"), Shifted(Param("a"), 1.0)), 0), np.float32),
    ],
)
def test_a_computed_weight_is_stored_in_what_loses_nothing(expression, kept):
    tensor = WeightTensor(expression, {"a": dense(ml_dtypes.bfloat16)})
    assert stored_dtype(tensor) == kept
    assert read_stored(tensor).dtype == kept
    np.testing.assert_array_equal(read_stored(tensor).astype(np.float32), tensor.numpy())


def test_scaled_scales_are_read_as_the_graph_has_them():
    tensor = WeightTensor(Scaled(Scales("w"), 0.1), {"w": quantized(4, symmetric=True)})
    assert stored_dtype(tensor) == np.float32
    np.testing.assert_array_equal(read_stored(tensor), tensor.numpy())


def quantized(bits, symmetric):
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (6, 8)).astype(np.uint8)
    zeros = None if symmetric else Dense.of(np.full((6, 1), 5, np.uint8))
    return Quantized(Dense.of(codes), Dense.of(np.ones((6, 1), np.float32)), zeros, bits, 8)


@pytest.mark.parametrize(("bits", "half"), [(3, 8), (4, 8), (5, 128), (8, 128)])
def test_symmetric_codes_are_moved_to_the_middle_of_their_type(bits, half):
    store = {"w": quantized(bits, symmetric=True)}
    tensor = WeightTensor(Codes("w"), store)
    np.testing.assert_array_equal(read_codes(tensor).astype(int) - half, tensor.numpy().astype(int))


def test_symmetric_parts_of_different_widths_share_a_zero_point():
    store = {"a": quantized(3, symmetric=True), "b": quantized(4, symmetric=True)}
    tensor = WeightTensor(Concat((Codes("a"), Codes("b")), axis=1), store)
    np.testing.assert_array_equal(read_codes(tensor).astype(int) - 8, tensor.numpy().astype(int))


def test_asymmetric_codes_and_zero_points_stay_as_they_are():
    store = {"w": quantized(4, symmetric=False)}
    codes, zeros = WeightTensor(Codes("w"), store), WeightTensor(Zeros("w"), store)
    np.testing.assert_array_equal(read_codes(codes), codes.numpy().astype(np.uint8))
    np.testing.assert_array_equal(read_codes(zeros), zeros.numpy().astype(np.uint8))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "place"), [(2, 4), (3, 4), (4, 4), (5, 8), (8, 8)])
def test_codes_of_a_table_fit_the_place_that_holds_them(bits, place, symmetric):
    store = {"w": quantized(bits, symmetric=symmetric)}
    tensor = WeightTensor(TableCodes("w"), store)
    assert tensor.dtype.bitwidth == 8
    assert table_bits(tensor) == place
    half = 1 << (place - 1) if symmetric else 0
    np.testing.assert_array_equal(read_codes(tensor, place).astype(int) - half, tensor.numpy().astype(int))
