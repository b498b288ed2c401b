"""A measurement is found again under what determines it, and under nothing else."""

import json
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest

import optimc_runtime
from optimc.errors import MeasureError, StorageError
from optimc.measure.load.goodput import Goodput
from optimc.measure.load.interval import Interval
from optimc.measure.machine import Machine
from optimc.measure.roofline.row_bound import RowBound
from optimc.measure.store import (
    EngineSwitches,
    LoadFigures,
    MeasurementStore,
    PlanSubject,
    ladder_key,
    measurement_key,
    quality_key,
)
from optimc.measure.store.engine_code import engine_code
from optimc.measure.workload import Workload
from optimc_runtime import _native

MACHINE = Machine("cpu", 2, None, "", (), 1 << 30, "Linux x86_64")
LOAD = Workload(prompt_tokens=16, output_tokens=4)
ON = EngineSwitches()


@pytest.fixture
def store(tmp_path):
    return MeasurementStore(tmp_path / "measurements")


@pytest.fixture
def subject(make_manifest):
    return PlanSubject("a", Path("/a.plan"), 10, make_manifest(), "c" * 64, "s" * 64)


def key(subject, load=LOAD, engine=ON, machine=MACHINE, what="bench", **details):
    return measurement_key(subject, load, engine, machine, what, details)


def test_what_was_saved_is_found(store, subject):
    assert store.load(key(subject)) is None
    measured_at = store.save(key(subject), {"x": [1, None, "ü"]})
    assert store.load(key(subject)) == {"x": [1, None, "ü"]}
    entry = store.entry(key(subject))
    assert (entry.what, entry.measured_at) == ("bench", measured_at)
    file = json.loads(store.path(key(subject)).read_text())
    assert set(file) == {"format", "what", "measured_at", "key", "data"}
    assert file["format"] == 2


def test_every_part_of_the_key_makes_another_measurement(store, subject):
    store.save(key(subject), {})
    source = subject.manifest.source.model_copy(update={"model_hash": "d" * 64})
    retrained = replace(subject, manifest=subject.manifest.model_copy(update={"source": source}))
    others = {
        "plan": key(replace(subject, content_hash="d" * 64)),
        "serving": key(replace(subject, serving_hash="d" * 64)),
        "source": key(retrained),
        "machine": key(subject, machine=replace(MACHINE, cores=4)),
        "engine": key(subject, engine=ON.turned_off("prefix_cache")),
        "threads": key(subject, engine=replace(ON, threads=1)),
        "workload": key(subject, replace(LOAD, concurrency=2)),
        "seed": key(subject, replace(LOAD, seed=1)),
        "what": key(subject, what="pair"),
        "details": key(subject, repeats=3),
    }
    assert [name for name, other in others.items() if store.load(other) is not None] == []


def test_name_and_place_of_the_plan_do_not_matter(store, subject):
    store.save(key(subject), {})
    assert store.load(key(replace(subject, name="b", path=Path("/b.plan")))) is not None


def test_a_default_that_is_stated_is_the_same_load(store, subject):
    store.save(key(subject), {})
    stated = replace(LOAD, requests=LOAD.num_requests, warmup_requests=LOAD.num_warmup_requests)
    assert store.load(key(subject, stated)) is not None


def test_quality_and_ladders_have_keys_of_their_own(subject):
    keys = [
        quality_key(subject, ON, MACHINE, windows=2, length=8),
        quality_key(subject, ON, MACHINE, windows=2, length=9),
        ladder_key(subject, LOAD, ON, MACHINE, attain=0.95),
        ladder_key(subject, LOAD, ON, MACHINE, attain=0.9),
        ladder_key(subject, LOAD, ON, MACHINE, attain=0.95, rates=(1, 2)),
    ]
    assert len({json.dumps(found, sort_keys=True) for found in keys}) == 5


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1}', '{"format": 2, "key": {}, "data": {}}'])
def test_a_damaged_file_is_refused_by_name(store, subject, text):
    store.save(key(subject), {})
    path = store.path(key(subject))
    path.write_text(text)
    with pytest.raises(MeasureError, match=f"{path.name}: not a measurement .*--fresh"):
        store.load(key(subject))


@pytest.mark.parametrize("data", [b"\xff\xfe\x00", b"[" * 100_000, b"\x00" * 64])
def test_a_file_of_other_bytes_is_damaged_too(store, subject, data):
    store.save(key(subject), {})
    store.path(key(subject)).write_bytes(data)
    with pytest.raises(MeasureError, match="not a measurement .*--fresh"):
        store.load(key(subject))


def test_a_disk_that_is_full_is_said_and_nothing_is_left_half_written(store, subject, monkeypatch):
    store.save(key(subject), {"earlier": 1})

    def full(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(StorageError, match="No space left"):
        store.save(key(subject), {"later": 1})
    assert store.load(key(subject)) == {"earlier": 1}
    assert [path.suffix for path in store.path(key(subject)).parent.iterdir()] == [".json"]


def test_data_of_another_kind_is_refused_too(store, subject):
    store.save(key(subject), {"x": 1})
    with pytest.raises(MeasureError, match="not a measurement"):
        store.load_as(key(subject), LoadFigures.from_json)


def test_of_two_writers_at_once_one_stays_whole(store, subject):
    threads = [
        threading.Thread(target=lambda n=n: [store.save(key(subject), {"n": n, "fill": [n] * 2000}) for _ in range(20)])
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = store.load(key(subject))
    assert found["fill"] == [found["n"]] * 2000
    assert [path.suffix for path in store.path(key(subject)).parent.iterdir()] == [".json"]


def test_load_figures_come_back_as_they_were():
    figures = LoadFigures(
        8, 32, 1, 10.0, 11.0, None, 1.0, 1.1, None, 99.0, 2.5, ("slow",),
        goodput=Goodput(30, 32, 2.3, {"ttft": 1, "failure": 1}),
        intervals={"ttft_ms.p50": Interval(9.0, 11.0, n=32, method="bootstrap")},
        bound=RowBound(0.5, 0.5, None, None, "memory", 0.8, ""),
        runs=3,
    )  # fmt: skip
    assert LoadFigures.from_json(json.loads(json.dumps(figures.to_json()))) == figures


def test_switches_are_the_engines_options():
    off = ON.turned_off("inflight_batching").turned_off("speculation")
    config = replace(off, threads=1, max_seqs=4).to_engine_config()
    assert (config.inflight_batching, config.prefix_cache, config.threads, config.max_seqs) == (False, True, 1, 4)
    assert config.gap_factor == 0
    with pytest.raises(ValueError, match="'threads' is no switch"):
        ON.turned_off("threads")


def test_another_engine_code_or_instruction_set_is_another_key(subject, monkeypatch):
    key = measurement_key(subject, LOAD, ON, MACHINE, "bench")
    native_digits = engine_code.__wrapped__()
    assert key["versions"]["engine"] == native_digits
    monkeypatch.setattr(_native, "default_instruction_set", lambda: "another")
    assert engine_code.__wrapped__() == f"another {native_digits.split()[1]}"


def test_the_engine_code_is_that_of_every_file(tmp_path, monkeypatch):
    package = tmp_path / "optimc_runtime"
    shutil.copytree(Path(optimc_runtime.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(optimc_runtime, "__file__", str(package / "__init__.py"))
    before = engine_code.__wrapped__()
    assert before == engine_code.__wrapped__()
    with (package / "executor" / "__init__.py").open("a") as file:
        file.write("# changed")
    assert engine_code.__wrapped__() != before
