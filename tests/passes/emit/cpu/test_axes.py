"""Reshapes, slices and the like on arrays with one axis of rows."""

import pytest

from optimc_passes.emit.cpu.axes import Axes, columns, reshape, squeeze, unsqueeze
from optimc_passes.emit.cpu.no_kernel import NoKernelError

HEADS = Axes(1, (4, 8))


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ([-1, 32], Axes(0, (32,))),
        ([1, -1, 32], Axes(1, (32,))),
        ([1, 1, -1, 32], Axes(2, (32,))),
        ([1, -1, 2, 2, 8], Axes(1, (2, 2, 8))),
        ([0, 0, -1], Axes(1, (32,))),
        ([0, 0, 2, -1], Axes(1, (2, 16))),
        ([0, -1, 4, 8], Axes(1, (4, 8))),
        ([1, -1, 0, 8], Axes(1, (4, 8))),
    ],
)
def test_a_reshape_that_keeps_rows_changes_axes(target, expected):
    assert reshape(HEADS, target, allow_zero=False) == expected


@pytest.mark.parametrize("target", [[-1, 8], [4, -1, 8], [1, 7, 32], [-1], [1, -1, 33], [0, 0, 5, -1]])
def test_a_reshape_that_moves_rows_has_no_kernel(target):
    with pytest.raises(NoKernelError):
        reshape(HEADS, target, allow_zero=False)


def test_with_allow_zero_a_zero_is_no_copy():
    with pytest.raises(NoKernelError):
        reshape(HEADS, [0, -1, 32], allow_zero=True)


def test_axes_of_size_one_come_and_go():
    assert unsqueeze(Axes(0, ()), [0, 2]) == Axes(1, (1,))
    assert unsqueeze(Axes(0, (8,)), [-2]) == Axes(0, (1, 8))
    assert squeeze(Axes(1, (8,)), [0]) == Axes(0, (8,))
    assert squeeze(Axes(1, (1, 8)), [-2]) == Axes(1, (8,))
    assert squeeze(Axes(2, (1, 8)), None) == Axes(0, (8,))
    with pytest.raises(NoKernelError):
        squeeze(Axes(0, (8,)), [1])
    with pytest.raises(NoKernelError):
        squeeze(Axes(0, (8,)), [0])


def test_columns_are_neighbours_along_the_first_axis_of_a_row_only():
    assert columns(HEADS, 2, 1, 3) == (Axes(1, (2, 8)), 8)
    assert columns(Axes(1, (32,)), -1, 4, 32) == (Axes(1, (28,)), 4)
    for axis in (0, 1, 3):
        with pytest.raises(NoKernelError, match="not the first of a row"):
            columns(HEADS, axis, 0, 1)


def test_shapes_are_shown_as_the_graph_has_them():
    assert HEADS.show("T") == "[1, T, 4, 8]"
    assert Axes(0, ()).show("R") == "[R]"
