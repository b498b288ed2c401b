import numpy as np
import pytest
import torch

from optimc_passes.emit.tensorrt_kernels import row_kernels, rows_reference

# Bytes of a row: keys, a row that is no multiple of 16, the scales of one head, more than one block of a program.
WIDTHS = (256, 34, 2, 4112)
SLOTS = 40


def launch(kernel, pools, rows, slots, programs):
    """`pools` and `rows` are uint8 [·, width], one of each per tensor."""
    addresses = [torch.tensor([array.ctypes.data for array in arrays]) for arrays in (pools, rows)]
    widths = torch.tensor([pool.shape[1] for pool in pools], dtype=torch.int32)
    grid = (len(pools), programs)
    kernel[grid](*addresses, widths, torch.from_numpy(slots), len(slots), BLOCK_BYTES=2048)


def aligned(rng, rows, width):
    """Random uint8 [rows, width] that starts at a multiple of 16 bytes, as device memory does."""
    buffer = rng.integers(0, 256, rows * width + 16, dtype=np.uint8)
    start = -buffer.ctypes.data % 16
    return buffer[start : start + rows * width].reshape(rows, width)


def tensors(rng, num_rows):
    return [aligned(rng, SLOTS, w) for w in WIDTHS], [aligned(rng, num_rows, w) for w in WIDTHS]


@pytest.mark.parametrize("programs", [1, 3, 9], ids="{} programs".format)
def test_commit_is_bit_exact_and_drops_padding(programs):
    rng = np.random.default_rng(programs)
    pools, rows = tensors(rng, 9)
    slots = rng.permutation(SLOTS)[:9]
    slots[[2, 8]] = rows_reference.DROPPED
    expected = [pool.copy() for pool in pools]
    rows_reference.commit_rows(expected, rows, slots)
    launch(row_kernels.commit_rows, pools, rows, slots, programs)
    for got, want in zip(pools, expected, strict=True):
        np.testing.assert_array_equal(got, want)


def test_gather_is_bit_exact_and_leaves_padding_alone():
    rng = np.random.default_rng(0)
    pools, rows = tensors(rng, 7)
    slots = rng.permutation(SLOTS)[:7]
    slots[3] = rows_reference.DROPPED
    expected = [each.copy() for each in rows]
    rows_reference.gather_rows(pools, expected, slots)
    launch(row_kernels.gather_rows, pools, rows, slots, 4)
    for got, want in zip(rows, expected, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("src", "dst"),
    [([1, 2, 3], [2, 3, 4]), ([4, 3], [3, 4]), ([5, 6, 7, 8], [6, 5, 8, 9]), ([7], [7])],
    ids=["shift", "swap", "chain", "itself"],
)
def test_overlapping_moves_read_all_before_they_write(src, dst):
    rng = np.random.default_rng(0)
    pools, staging = tensors(rng, len(src))
    src, dst = np.array(src), np.array(dst)
    expected = [pool.copy() for pool in pools]
    for pool, want in zip(pools, expected, strict=True):
        want[dst] = pool[src]
    moved = [pool.copy() for pool in pools]
    rows_reference.move_rows(moved, src, dst)
    launch(row_kernels.gather_rows, pools, staging, src, 2)
    launch(row_kernels.commit_rows, pools, staging, dst, 2)
    for got, reference, want in zip(pools, moved, expected, strict=True):
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(reference, want)


def test_nothing_to_copy_touches_nothing():
    rng = np.random.default_rng(0)
    pools, rows = tensors(rng, 1)
    before = [pool.copy() for pool in pools]
    launch(row_kernels.commit_rows, pools, rows, np.empty(0, np.int64), 1)
    launch(row_kernels.commit_rows, pools, rows, np.array([rows_reference.DROPPED]), 1)
    for got, want in zip(pools, before, strict=True):
        np.testing.assert_array_equal(got, want)
