"""Native kernels of the optimc runtime. Arrays must have exactly the dtype given, in C order; nothing is converted.

Wrong dtypes raise TypeError, wrong shapes, ids or parameter ranges ValueError.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

STATUS_OK: int
STATUS_NAN: int
STATUS_EMPTY: int

def sample_rows(
    logits: NDArray[np.float32],
    *,
    temperature: NDArray[np.float32],
    top_k: NDArray[np.int32],
    top_p: NDArray[np.float32],
    min_p: NDArray[np.float32],
    repetition_penalty: NDArray[np.float32],
    presence_penalty: NDArray[np.float32],
    frequency_penalty: NDArray[np.float32],
    seed: NDArray[np.uint64],
    position: NDArray[np.uint64],
    num_logprobs: NDArray[np.int32],
    seen_start: NDArray[np.int64],
    seen_ids: NDArray[np.int32],
    seen_counts: NDArray[np.int32],
    bias_start: NDArray[np.int64],
    bias_ids: NDArray[np.int32],
    bias_values: NDArray[np.float32],
    banned_start: NDArray[np.int64],
    banned_ids: NDArray[np.int32],
) -> tuple[NDArray[np.uint8], NDArray[np.int32], NDArray[np.float32], NDArray[np.int32], NDArray[np.float32]]:
    """Choose a token per row of `logits` [R, V], which is only read. The GIL is released.

    Parameters are [R]; temperature 0 is greedy, top_k 0, top_p 1 and min_p 0 keep all, num_logprobs -1 reports none.
    Row r owns entries `start[r]:start[r + 1]` of the ragged arrays: `seen` tokens of prompt and output with their
    output counts, biases, and tokens that may not be chosen.

    Returns (status [R], token ids [R], logprobs [R], top ids [R, N], top logprobs [R, N]) with N the largest
    num_logprobs. Entries of a row whose status is not STATUS_OK, and those past its num_logprobs, mean nothing.
    """

def row_max(row: NDArray[np.float32]) -> tuple[float, int, bool]:
    """Return (largest value, its lowest index, whether there is a NaN)."""

def row_max_reference(row: NDArray[np.float32]) -> tuple[float, int, bool]:
    """Scalar reference of row_max."""

def softmax_weights(row: NDArray[np.float32], max: float, temperature: float) -> NDArray[np.float32]:
    """Return exp(-(max - row) / temperature)."""

def softmax_weights_reference(row: NDArray[np.float32], max: float, temperature: float) -> NDArray[np.float32]:
    """Scalar reference of softmax_weights."""

def log_sum_exp(row: NDArray[np.float32], max: float) -> float:
    """Return log(sum(exp(row - max)))."""

def log_sum_exp_reference(row: NDArray[np.float32], max: float) -> float:
    """Scalar reference of log_sum_exp."""

def cutoff_by_count(row: NDArray[np.float32], max: float, count: int) -> tuple[float, int]:
    """Return (distance from max, id) of the last of the `count` nearest tokens, equal ones ordered by id."""

def cutoff_by_count_reference(row: NDArray[np.float32], max: float, count: int) -> tuple[float, int]:
    """Sorting reference of cutoff_by_count."""

def cutoff_by_mass(
    row: NDArray[np.float32], weights: NDArray[np.float32], max: float, temperature: float, share: float
) -> tuple[float, int]:
    """Return (distance, id) of the last of the nearest tokens whose weights reach `share` of the sum."""

def cutoff_by_mass_reference(
    row: NDArray[np.float32], weights: NDArray[np.float32], max: float, share: float
) -> tuple[float, int]:
    """Sorting reference of cutoff_by_mass."""

def draw(weights: NDArray[np.float32], uniform: float) -> int:
    """Return the index whose share of the running sum contains `uniform`."""

def draw_reference(weights: NDArray[np.float32], uniform: float) -> int:
    """Scalar reference of draw."""

def philox4x32(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Return the Philox4x32-10 block of a counter [4] under a key [2], 32-bit words."""

def uniform_at(seed: int, position: int) -> float:
    """Return the number in [0, 1) that decides the draw at an output position."""
