"""Activations come back as they were stored, from memory and from files, and their second moments are right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from optimc_passes.walk.activations import Activations, second_moment
from optimc_passes.walk.budget import Budget

LENGTHS = (7, 1, 12)
WIDTH = 40
BYTES = 20 * WIDTH * 4


def rows(seed: int, width: int = WIDTH) -> list[NDArray[np.float32]]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((length, width)).astype(np.float32) for length in LENGTHS]


def filled(windows: list[NDArray[np.float32]], budget: Budget, folder: Path | None = None) -> Activations:
    x = Activations(LENGTHS, windows[0].shape[1], budget=budget, folder=folder)
    for index in (2, 0, 1):
        x.put(index, windows[index])
    return x


@pytest.mark.parametrize("limit", [None, 0])
def test_windows_come_back(limit: int | None, tmp_path: Path):
    windows = rows(0)
    x = filled(windows, Budget(limit, 0), tmp_path)
    assert x.in_memory == (limit is None)
    assert all(np.array_equal(x.window(index), window) for index, window in enumerate(windows))
    x.put(1, windows[1] * 2)
    assert np.array_equal(x.window(1), windows[1] * 2)
    assert np.array_equal(x.window(0), windows[0])


def test_memory_is_used_while_it_lasts_and_given_back(tmp_path: Path):
    budget = Budget(1000 + BYTES, 1000)
    first = filled(rows(0), budget, tmp_path)
    second = filled(rows(1), budget, tmp_path)
    assert first.in_memory
    assert not second.in_memory
    del first
    assert filled(rows(2), budget, tmp_path).in_memory


@pytest.mark.parametrize("limit", [None, 0])
def test_a_saved_file_loads(limit: int | None, tmp_path: Path):
    windows = rows(0)
    filled(windows, Budget(limit, 0), tmp_path).save(tmp_path / "x.f32")
    loaded = Activations.load(tmp_path / "x.f32", LENGTHS, WIDTH, budget=Budget(limit, 0), folder=tmp_path)
    assert all(np.array_equal(loaded.window(index), window) for index, window in enumerate(windows))
    with pytest.raises(ValueError, match=f"{BYTES} bytes, want {BYTES // WIDTH * 41}"):
        Activations.load(tmp_path / "x.f32", LENGTHS, 41, budget=Budget(limit, 0), folder=tmp_path)


@pytest.mark.parametrize("width", [40, 1030])
def test_second_moments_equal_float64(width: int):
    """Width 1030 takes three blocks, the last one ragged. Sums of 20 products: a few float32 roundings."""
    windows = rows(0, width)
    stacked = np.concatenate(windows).astype(np.float64)
    moment = second_moment(filled(windows, Budget(None, 0)))
    assert moment.dtype == np.float32
    assert np.abs(moment - stacked.T @ stacked).max() < 1e-5 * np.abs(stacked.T @ stacked).max()
    assert np.array_equal(moment, moment.T) or np.abs(moment - moment.T).max() < 1e-5


def test_cross_moments_equal_float64():
    windows, others = rows(0), rows(1)
    expected = np.concatenate(windows).astype(np.float64).T @ np.concatenate(others)
    cross = second_moment(filled(windows, Budget(None, 0)), filled(others, Budget(None, 0)))
    assert np.abs(cross - expected).max() < 1e-5 * np.abs(expected).max()


def test_second_moments_do_not_depend_on_where_activations_are(tmp_path: Path):
    windows = rows(0)
    moments = [second_moment(filled(windows, Budget(limit, 0), tmp_path)) for limit in (None, 0)]
    assert np.array_equal(*moments)
