import json
import multiprocessing
import os
import signal
import time

import ml_dtypes
import numpy as np
import pytest
from safetensors import SafetensorError

from optimc.errors import StorageError
from optimc.plan import FusionReport, PassReport
from optimc_passes.cache import ArtifactCache
from optimc_passes.cache_entry import EntryWriter, read_entry, remove_abandoned, scratch_folder
from optimc_passes.graph.attach import attach_weights
from optimc_passes.graph.exported import Exported
from optimc_passes.graph.serialize import to_bytes
from optimc_passes.weights import Dense, Quantized

KEY = "0" * 64
REPORT = PassReport(
    name="p", version=1, config={"a": 1}, seconds=1.5, peak_bytes=7, metrics={"m": 0.5}, decisions=("d",)
)


@pytest.fixture
def cache(tmp_path):
    return ArtifactCache(tmp_path / "cache")


@pytest.fixture
def weights(quantized):
    rng = np.random.default_rng(0)
    array = rng.standard_normal((6, 10)).astype(np.float32)
    order = rng.permutation(10).astype(np.int32)
    return {
        "dense": Dense.of(array),
        "half": Dense.of(array.astype(ml_dtypes.bfloat16)),
        "plain": quantized(array, symmetric=True, group=4),
        "full": quantized(array, group=3, bits=8, permutation=order),
    }


def store(cache, weights, key=KEY):
    with cache.write_weights(key) as writer:
        writer.commit(weights, REPORT)


def same(left, right):
    if isinstance(left, Dense):
        return left.dtype == right.dtype and left.shape == right.shape and np.array_equal(left.read(), right.read())
    parts = ("codes", "scales", "zeros", "permutation")
    return (left.bits, left.group, left.method) == (right.bits, right.group, right.method) and all(
        (getattr(left, part) is None and getattr(right, part) is None)
        or same(getattr(left, part), getattr(right, part))
        for part in parts
    )


def files(root):
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def test_weights_come_back_as_they_went_in_with_a_report_that_says_cached(cache, weights):
    store(cache, weights)
    found, report, *_ = cache.load_weights(KEY)
    assert list(found) == list(weights)
    assert all(same(found[name], weight) for name, weight in weights.items())
    assert report == REPORT.model_copy(update={"cached": True})


def test_an_unknown_key_is_a_miss(cache, weights):
    store(cache, weights)
    assert cache.load_weights("1" * 64) is None
    assert cache.load_graph(KEY, {}) is None


def test_loading_maps_files_and_copies_nothing(cache, weights):
    store(cache, weights)
    array = cache.load_weights(KEY).weights["full"].codes.read()
    while array.base is not None and not isinstance(array.base, memoryview | bytes):
        if isinstance(array, np.memmap):
            break
        array = array.base
    assert isinstance(array, np.memmap)
    assert not array.flags.writeable


def test_kept_weights_are_written_at_once_and_not_again(cache, weights):
    with cache.write_weights(KEY) as writer:
        kept = {name: writer.keep(name, weight) for name, weight in weights.items()}
        written = files(cache.root)
        writer.commit(kept, REPORT)
    assert all(same(found, weights[name]) for name, found in cache.load_weights(KEY).weights.items())
    assert len([name for name in written if name.endswith("safetensors")]) == 4
    assert len(files(cache.root)) == 5


def test_a_weight_kept_twice_counts_as_kept_last(cache):
    first, second = (Dense.of(np.full(3, value, np.float32)) for value in (1, 2))
    with cache.write_weights(KEY) as writer:
        writer.keep("a", first)
        changed = {"a": writer.keep("a", second), "b": writer.keep("b", first)}
        writer.commit(changed, REPORT)
    found = cache.load_weights(KEY).weights
    assert (found["a"].read()[0], found["b"].read()[0]) == (2, 1)


def test_a_pass_that_fails_leaves_nothing(cache, weights):
    def fail():
        with cache.write_weights(KEY) as writer:
            writer.keep("full", weights["full"])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert files(cache.root) == []
    assert cache.load_weights(KEY) is None


@pytest.mark.parametrize("harm", ["truncate", "flip", "delete", "index", "index_gone"])
def test_a_harmed_entry_is_a_miss_and_is_replaced(cache, weights, harm):
    store(cache, weights)
    folder = cache.root / "weights" / KEY
    target = sorted(folder.glob("*.safetensors"))[0]
    if harm == "truncate":
        target.write_bytes(target.read_bytes()[:-1])
    elif harm == "flip":
        data = bytearray(target.read_bytes())
        data[-1] ^= 1
        target.write_bytes(data)
    elif harm == "delete":
        target.unlink()
    elif harm == "index":
        (folder / "entry.json").write_text("{")
    else:
        (folder / "entry.json").unlink()
    assert cache.load_weights(KEY) is None
    store(cache, weights)
    assert same(cache.load_weights(KEY).weights["dense"], weights["dense"])


def test_an_entry_of_another_layout_is_a_miss(cache):
    with EntryWriter(cache.root, "weights", KEY) as entry:
        entry.commit({"something": "else"})
    assert cache.load_weights(KEY) is None
    assert read_entry(cache.root / "weights" / KEY) == {"something": "else"}


def test_whoever_comes_first_wins_and_both_read_the_same(cache, weights):
    with cache.write_weights(KEY) as slow:
        store(cache, weights)
        before = files(cache.root / "weights")
        slow.commit(weights, REPORT)
    assert files(cache.root / "weights") == before
    assert list((cache.root / "tmp").iterdir()) == []
    assert same(cache.load_weights(KEY).weights["full"], weights["full"])


def write_and_wait(root, ready):
    with ArtifactCache(root).write_weights(KEY) as writer:
        writer.keep("a", Dense.of(np.ones(1000, np.float32)))
        ready.set()
        time.sleep(60)


def test_a_killed_build_leaves_no_entry_and_its_leftovers_are_swept_up(cache):
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=write_and_wait, args=(cache.root, ready))
    process.start()
    assert ready.wait(30)
    folder = next((cache.root / "tmp").iterdir())
    os.utime(folder, (0, 0))
    remove_abandoned(cache.root)
    assert folder.exists(), "its writer is alive"
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert cache.load_weights(KEY) is None
    ArtifactCache(cache.root)
    assert not folder.exists()


def test_a_graph_comes_back_bound_to_the_store(cache, tiny_decoder):
    decoder = tiny_decoder(layers=1)
    model = attach_weights(decoder.model, decoder.store)
    cache.save_graph(KEY, model, REPORT)
    found, report = cache.load_graph(KEY, decoder.store)
    assert to_bytes(found) == to_bytes(model)
    assert report.cached
    assert np.array_equal(
        found.graph.initializers["model.norm.weight"].const_value.numpy(), decoder.arrays["model.norm.weight"]
    )


def test_an_exported_graph_needs_no_store_and_keeps_what_was_done_to_it(cache, tiny_decoder):
    decoder = tiny_decoder(layers=1)
    rewrites = {"rotary": FusionReport(matched=2), "gather_rows": FusionReport()}
    cache.save_export(KEY, Exported(decoder.model, 99, rewrites, raw=decoder.model), 1.5)
    found, seconds = cache.load_export(KEY)
    assert to_bytes(found.model) == to_bytes(decoder.model)
    assert (found.raw_nodes, found.rewrites, found.raw, seconds) == (99, rewrites, None, 1.5)
    assert list(found.rewrites) == ["rotary", "gather_rows"]


def test_an_export_does_not_stand_in_for_a_pass_nor_a_pass_for_an_export(cache, tiny_decoder):
    decoder = tiny_decoder(layers=1)
    cache.save_export(KEY, Exported.of(decoder.model), 0.0)
    cache.save_graph("1" * 64, decoder.model, REPORT)
    assert cache.load_graph(KEY, {}) is None
    assert cache.load_export("1" * 64) is None


def test_a_graph_that_does_not_fit_the_store_is_a_miss(cache, tiny_decoder):
    decoder = tiny_decoder(layers=1)
    cache.save_graph(KEY, attach_weights(decoder.model, decoder.store), REPORT)
    assert cache.load_graph(KEY, tiny_decoder(layers=1, hidden=16).store) is None
    assert cache.load_graph(KEY, {}) is None


def test_clearing_removes_every_entry(cache, weights, tiny_decoder):
    store(cache, weights)
    cache.save_graph(KEY, tiny_decoder(layers=1).model, REPORT)
    cache.clear()
    assert files(cache.root) == []
    assert cache.load_weights(KEY) is None


def test_equal_weights_give_equal_bytes(cache, weights):
    store(cache, weights, "1" * 64)
    store(cache, weights, "2" * 64)
    first, second = (cache.root / "weights" / (digit * 64) for digit in "12")
    assert [p.read_bytes() for p in sorted(first.iterdir())] == [p.read_bytes() for p in sorted(second.iterdir())]
    assert json.loads((first / "entry.json").read_text())["payload"]["report"]["name"] == "p"


def test_a_quantized_weight_keeps_its_kind(cache, weights):
    store(cache, weights)
    found = cache.load_weights(KEY).weights
    assert isinstance(found["full"], Quantized)
    assert np.array_equal(found["full"].dequantize(), weights["full"].dequantize())


def test_a_place_that_takes_no_files_is_named(tmp_path, weights):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(StorageError, match=r"the cache cannot be written to .*file: Not a directory"),
        ArtifactCache(tmp_path / "file").write_weights(KEY),
    ):
        pytest.fail("opened")


def test_a_full_disk_is_said_in_words(cache, weights, monkeypatch):
    def full(*_args):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("optimc_passes.cache.save_file", full)
    with pytest.raises(StorageError, match="No space left"), cache.write_weights(KEY) as writer:
        writer.keep("w", Dense.of(np.ones(3, np.float32)))
    assert cache.load_weights(KEY) is None
    assert list((cache.root / "tmp").iterdir()) == []


def test_a_scratch_folder_is_gone_afterwards_and_found_by_the_next_if_its_owner_died(tmp_path):
    with scratch_folder(tmp_path) as folder:
        (folder / "file").write_text("x")
    assert not folder.exists()
    left = tmp_path / "tmp" / "left"
    left.mkdir()
    os.utime(left, (1, 1))
    with scratch_folder(tmp_path) as folder:
        assert list((tmp_path / "tmp").iterdir()) == [folder]
