import numpy as np
import pytest

from optimc.errors import CalibrationError
from optimc_passes.calibrate.padding import rows_of_padded


def test_the_mask_decides_and_not_the_id():
    """Token 2 both ends the text and pads it, on either side."""
    ids = np.array([[7, 2, 5, 2, 2], [2, 2, 2, 8, 9], [2, 2, 2, 2, 2]])
    mask = np.array([[1, 1, 1, 1, 0], [0, 0, 1, 1, 1], [0, 0, 0, 0, 0]])
    rows = rows_of_padded(ids, mask)
    assert [row.tolist() for row in rows] == [[7, 2, 5, 2], [2, 8, 9]]
    assert all(row.dtype == np.int32 for row in rows)
    assert [row.tolist() for row in rows_of_padded(ids, mask.astype(bool))] == [[7, 2, 5, 2], [2, 8, 9]]


def test_a_gap_is_an_error():
    with pytest.raises(CalibrationError, match="row 1 is interrupted by padding at 2"):
        rows_of_padded(np.ones((2, 5), int), np.array([[1, 1, 1, 1, 1], [0, 1, 0, 0, 1]]))


def test_shapes_must_agree():
    with pytest.raises(CalibrationError, match=r"ids \[2, 5\] and mask \[2, 4\]"):
        rows_of_padded(np.ones((2, 5), int), np.ones((2, 4), int))
