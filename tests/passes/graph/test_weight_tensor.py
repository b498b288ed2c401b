import gc
import weakref

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest

from optimc_passes.graph.weight_expression import (
    Codes,
    Concat,
    Param,
    Permutation,
    Scaled,
    Scales,
    Shifted,
    Transposed,
    Zeros,
    code_dtype,
    from_json,
    keeps_dtype,
    to_json,
)
from optimc_passes.graph.weight_tensor import WeightTensor
from optimc_passes.weights import Dense, Quantized, WeightStore

CODES = np.array([[0, 5, 15, 8, 1], [7, 8, 9, 2, 3], [15, 0, 4, 4, 4]], np.uint8)
SCALES = np.array([[0.5, 2], [1, 0.25], [3, 1]], np.float32)
ZEROS = np.array([[8, 1], [0, 15], [4, 4]], np.uint8)
ORDER = np.array([4, 2, 0, 1, 3], np.int32)
DENSE = np.array([[1.5, -2, 0, 4, 5], [6, 7, 8, 9, 10], [0.25, 0, 0, 0, 1]], np.float32)


def asymmetric(bits=4, permutation=None):
    return Quantized(
        Dense.of(CODES),
        Dense.of(SCALES),
        Dense.of(ZEROS),
        bits,
        group=3,
        permutation=None if permutation is None else Dense.of(permutation),
    )


STORE = WeightStore(
    {
        "dense": Dense.of(DENSE),
        "half": Dense.of(DENSE.astype(ml_dtypes.bfloat16)),
        "four": asymmetric(permutation=ORDER),
        "eight": asymmetric(bits=8),
        "symmetric": Quantized(Dense.of(CODES), Dense.of(SCALES), None, 4, group=3),
        "symmetric8": Quantized(Dense.of(CODES), Dense.of(SCALES), None, 8, group=3),
    }
)


@pytest.mark.parametrize(
    ("expression", "dtype", "expected"),
    [
        (Param("dense"), ir.DataType.FLOAT, DENSE),
        (Param("half"), ir.DataType.FLOAT, DENSE),
        (Transposed(Param("half")), ir.DataType.FLOAT, DENSE.T),
        (Concat((Param("dense"), Param("half")), 0), ir.DataType.FLOAT, np.concatenate([DENSE, DENSE])),
        (Scaled(Param("half"), 0.1), ir.DataType.FLOAT, DENSE * np.float32(0.1)),
        (Scaled(Scales("four"), 3.0), ir.DataType.FLOAT, SCALES.T * 3),
        (Shifted(Param("half"), 1.0), ir.DataType.FLOAT, DENSE + 1),
        (
            Concat((Scaled(Param("dense"), 2.0), Param("half")), 0),
            ir.DataType.FLOAT,
            np.concatenate([2 * DENSE, DENSE]),
        ),
        (Codes("four"), ir.DataType.UINT4, CODES.T),
        (Codes("eight"), ir.DataType.UINT8, CODES.T),
        (Codes("symmetric"), ir.DataType.INT4, CODES.T.astype(int) - 8),
        (Codes("symmetric8"), ir.DataType.INT8, CODES.T.astype(int) - 128),
        (Scales("four"), ir.DataType.FLOAT, SCALES.T),
        (Zeros("four"), ir.DataType.UINT4, ZEROS.T),
        (Zeros("eight"), ir.DataType.UINT8, ZEROS.T),
        (Concat((Codes("four"), Codes("four")), 1), ir.DataType.UINT4, np.concatenate([CODES.T, CODES.T], 1)),
        (Permutation("four"), ir.DataType.INT64, ORDER),
        (Permutation("four", inverse=True), ir.DataType.INT64, [2, 3, 1, 4, 0]),
    ],
)
def test_an_expression_has_the_declared_dtype_shape_and_values(expression, dtype, expected):
    tensor = WeightTensor(expression, STORE, name="w")
    array = tensor.numpy()
    assert tensor.dtype == dtype
    assert tensor.shape == np.shape(expected) == array.shape
    assert np.array_equal(array.astype(np.float32), expected)


def test_its_bytes_are_what_onnx_reads_back():
    for expression in (Codes("four"), Codes("symmetric"), Zeros("four"), Scales("four"), Permutation("four")):
        tensor = WeightTensor(expression, STORE, name="w")
        assert len(tensor.tobytes()) == tensor.nbytes
        read = onnx.numpy_helper.to_array(ir.to_proto(tensor))
        assert np.array_equal(read.astype(np.float32), tensor.numpy().astype(np.float32))


@pytest.mark.parametrize(
    "expression",
    [
        Param("a"),
        Transposed(Param("a")),
        Concat((Codes("a"), Codes("b")), 1),
        Zeros("a"),
        Permutation("a", inverse=True),
        Scaled(Transposed(Param("a")), 0.1),
        Shifted(Param("a"), 1.0),
        Concat((Scaled(Scales("a"), 3.0), Scales("b")), 1),
    ],
)
def test_json_reads_back_equal(expression):
    assert from_json(to_json(expression)) == expression


@pytest.mark.parametrize("data", [{"kind": "Nothing"}, {}, {"kind": "Param", "nome": "a"}])
def test_json_of_something_else_is_refused(data):
    with pytest.raises(ValueError, match="not a weight expression"):
        from_json(data)


def test_nothing_is_kept_between_reads():
    alive = []

    def read():
        array = np.ones((4, 4), np.float32)
        alive.append(weakref.ref(array))
        return array

    tensor = WeightTensor(Param("w"), {"w": Dense((4, 4), np.dtype(np.float32), read)}, name="w")
    tensor.numpy()
    tensor.tobytes()
    gc.collect()
    assert len(alive) == 2
    assert not any(reference() is not None for reference in alive)


def test_binding_reads_no_data():
    def read():
        raise AssertionError("data was read")

    lazy = {"w": Dense((4, 2), np.dtype(np.float32), read)}
    assert WeightTensor(Transposed(Param("w")), lazy).shape == (2, 4)


def test_a_missing_weight_and_a_wrong_kind_are_named():
    with pytest.raises(KeyError, match="gone"):
        WeightTensor(Param("gone"), STORE)
    with pytest.raises(ValueError, match="four is quantized"):
        WeightTensor(Param("four"), STORE)
    with pytest.raises(ValueError, match="dense is dense"):
        WeightTensor(Codes("dense"), STORE)
    with pytest.raises(ValueError, match="symmetric is symmetric"):
        WeightTensor(Zeros("symmetric"), STORE)
    with pytest.raises(ValueError, match="eight is not permuted"):
        WeightTensor(Permutation("eight"), STORE)


def test_parts_of_different_dtype_or_shape_do_not_join():
    for other in (Codes("eight"), Scales("four")):
        with pytest.raises(ValueError, match="cannot be joined"):
            WeightTensor(Concat((Codes("four"), other), 1), STORE)


def test_codes_of_odd_widths_take_the_smallest_type_that_holds_them():
    assert code_dtype(3, symmetric=False) == ir.DataType.UINT4
    assert code_dtype(5, symmetric=True) == ir.DataType.INT8
    with pytest.raises(ValueError, match="1 to 8 bits"):
        code_dtype(9, symmetric=True)


@pytest.mark.parametrize("expression", [Codes("four"), Zeros("four"), Permutation("four")])
def test_integers_are_neither_scaled_nor_shifted(expression):
    for changed in (Scaled(expression, 2.0), Shifted(expression, 1.0)):
        with pytest.raises(ValueError, match="only float32 is scaled or shifted"):
            WeightTensor(changed, STORE)


@pytest.mark.parametrize(
    ("dtype", "factor", "kept"),
    [
        (np.float32, 0.1, True),
        (ml_dtypes.bfloat16, 0.25, True),
        (ml_dtypes.bfloat16, -8.0, True),
        (ml_dtypes.bfloat16, 0.22, False),
        (ml_dtypes.bfloat16, 0.0, False),
        (np.float16, 2.0, False),
    ],
)
def test_powers_of_two_keep_bfloat16(dtype, factor, kept):
    assert keeps_dtype(np.dtype(dtype), factor) == kept
