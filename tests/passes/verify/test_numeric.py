import numpy as np
import pytest

from optimc_passes.verify.numeric import relative_error


def test_the_error_is_relative_to_the_largest_value_of_the_row():
    before = np.array([[1, -10], [0.1, 0.01]], np.float32)
    after = before + np.array([[0.1, 0], [0, 0.005]], np.float32)
    assert relative_error(before, after) == pytest.approx(0.05)


def test_what_is_no_number_is_over_every_tolerance():
    before = np.ones((2, 3), np.float32)
    assert not relative_error(before, np.full_like(before, np.nan)) <= 1
    assert not relative_error(before, np.full_like(before, np.inf)) <= 1


def test_axes_of_one_do_not_count_and_other_shapes_are_infinitely_far():
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert relative_error(rows[None], rows) == 0
    assert relative_error(rows, rows.T) == np.inf
    assert relative_error(np.float32(2), np.array([[3.0]])) == 0.5


def test_whole_numbers_are_compared_as_numbers():
    assert relative_error(np.array([0, 4]), np.array([1, 4])) == 0.25
    assert relative_error(np.array([True]), np.array([False])) == 1


def test_nothing_equals_nothing():
    assert relative_error(np.zeros((0, 3)), np.zeros((0, 3))) == 0
