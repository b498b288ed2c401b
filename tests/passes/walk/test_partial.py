"""Unfinished work is found again whole, or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optimc.plan import LayerReport
from optimc_passes.artifact import derive_key
from optimc_passes.cache_entry import remove_partial
from optimc_passes.walk.activations import Activations
from optimc_passes.walk.budget import Budget
from optimc_passes.walk.partial import Finished, PartialWork
from optimc_passes.weights import Dense, Quantized

LENGTHS = (4, 3)


def activations(value: float) -> Activations:
    x = Activations(LENGTHS, 8, budget=Budget(None, 0), folder=None)
    for index, length in enumerate(LENGTHS):
        x.put(index, np.full((length, 8), value + index, np.float32))
    return x


def finished(layer: int, quantized: Callable[..., Quantized]) -> Finished:
    weight = quantized(np.random.default_rng(layer).standard_normal((6, 32)).astype(np.float32))
    norm = Dense.of(np.full(8, layer, np.float32))
    rows = (LayerReport(layer=str(layer), bits=4),)
    return Finished({f"{layer}.weight": weight, f"{layer}.norm": norm}, rows, {f"{layer}": (layer + 1) / 3})


@pytest.fixture
def folder(tmp_path: Path, quantized: Callable[..., Quantized]) -> Path:
    """Two finished layers, their writer gone."""
    with PartialWork(tmp_path / "partial") as work:
        assert work.load() is None
        work.save(1, finished(0, quantized), {"quantized": activations(1)})
        work.save(2, finished(1, quantized), {"quantized": activations(2)})
    return tmp_path / "partial"


def test_finished_layers_and_the_latest_activations_are_found(folder: Path, quantized: Callable[..., Quantized]):
    with PartialWork(folder) as work:
        resumed = work.load()
        assert resumed is not None
        assert resumed.done == 2
        assert [row.layer for row in resumed.rows] == ["0", "1"]
        assert set(resumed.weights) == {"0.weight", "0.norm", "1.weight", "1.norm"}
        assert resumed.measured == {"0": 1 / 3, "1": 2 / 3}
        expected = finished(1, quantized).weights["1.weight"]
        found = resumed.weights["1.weight"]
        assert isinstance(found, Quantized)
        assert np.array_equal(found.codes.read(), expected.codes.read())
        assert np.array_equal(found.dequantize(), expected.dequantize())
        loaded = Activations.load(resumed.streams["quantized"], LENGTHS, 8, budget=Budget(None, 0), folder=None)
        assert np.array_equal(loaded.window(1), activations(2).window(1))
    assert [path.name for path in folder.glob("stream-*")] == ["stream-2-quantized.f32"]


def test_work_goes_on_where_it_was(folder: Path, quantized: Callable[..., Quantized]):
    with PartialWork(folder) as work:
        work.load()
        work.save(3, finished(2, quantized), {"quantized": activations(3)})
    with PartialWork(folder) as work:
        resumed = work.load()
        assert resumed is not None
        assert resumed.done == 3
        assert len(resumed.weights) == 6


@pytest.mark.parametrize("file", ["00001.safetensors", "stream-2-quantized.f32", "progress.json"])
@pytest.mark.parametrize("harm", ["flipped", "truncated", "gone"])
def test_harmed_work_is_thrown_away(folder: Path, file: str, harm: str):
    path = folder / file
    data = path.read_bytes()
    if harm == "flipped":
        path.write_bytes(data[:-5] + bytes([data[-5] ^ 1]) + data[-4:])
    elif harm == "truncated":
        path.write_bytes(data[:-1])
    else:
        path.unlink()
    with PartialWork(folder) as work:
        assert work.load() is None
        assert [path.name for path in folder.iterdir()] == [".lock"]


def test_a_layer_that_was_being_written_counts_as_not_begun(folder: Path):
    """What a kill leaves between two states: files that no progress mentions."""
    (folder / "00004.safetensors").write_bytes(b"half")
    (folder / "stream-3-quantized.f32").write_bytes(b"half")
    with PartialWork(folder) as work:
        resumed = work.load()
    assert resumed is not None
    assert resumed.done == 2
    assert not (folder / "00004.safetensors").exists()
    assert not (folder / "stream-3-quantized.f32").exists()


def test_a_second_process_works_without(folder: Path, quantized: Callable[..., Quantized]):
    with PartialWork(folder) as first:
        assert first.load() is not None
        with PartialWork(folder) as second:
            assert second.load() is None
            second.save(9, finished(8, quantized), {"quantized": activations(9)})
        remove_partial(folder)
    assert json.loads((folder / "progress.json").read_text())["progress"]["done"] == 2
    remove_partial(folder)
    assert not folder.exists()


def test_reports_of_another_version_count_as_nothing(folder: Path):
    progress: dict[str, Any] = json.loads((folder / "progress.json").read_text())["progress"]
    progress["rows"][0]["field of tomorrow"] = 1
    (folder / "progress.json").write_text(json.dumps({"sha256": derive_key(progress), "progress": progress}))
    with PartialWork(folder) as work:
        assert work.load() is None
