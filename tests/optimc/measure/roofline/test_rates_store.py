"""A machine is measured once, and again when anything about it is another."""

import json

import pytest

from optimc.errors import MeasureError
from optimc.measure.roofline import rates_store
from optimc.measure.roofline.rates_store import load_rates, rates_path, save_rates, try_rates


@pytest.fixture
def measure(make_rates):
    asked = []

    def take(threads):
        asked.append(threads)
        return make_rates(threads=threads)

    take.asked = asked
    return take


def test_rates_are_measured_once_and_that_is_told(tmp_path, measure, capsys):
    first = try_rates(tmp_path, 2, measure=measure)
    assert "about 20 s" in capsys.readouterr().err
    assert try_rates(tmp_path, 2, measure=measure) == first
    assert measure.asked == [2]
    assert capsys.readouterr().err == ""


def test_fresh_measures_again(tmp_path, measure):
    try_rates(tmp_path, 2, measure=measure)
    try_rates(tmp_path, 2, fresh=True, measure=measure)
    assert measure.asked == [2, 2]


def test_fresh_keeps_the_best_peaks_ever_seen(tmp_path, make_rates):
    first = make_rates(bandwidth=((1 << 20, 40e9), (4 << 20, 10e9)), int8_ops_per_s=90e9, op_s=1.0)
    again = make_rates(
        bandwidth=((1 << 20, 30e9), (4 << 20, 20e9)), int8_ops_per_s=80e9, float_ops_per_s=60e9, op_s=2.0
    )
    try_rates(tmp_path, 2, measure=lambda _: first)
    kept = try_rates(tmp_path, 2, fresh=True, measure=lambda _: again)
    assert kept.bandwidth == ((1 << 20, 40e9), (4 << 20, 20e9))
    assert (kept.int8_ops_per_s, kept.float_ops_per_s) == (90e9, 60e9)
    assert kept.op_s == 2.0  # predictions are of now
    assert try_rates(tmp_path, 2) == kept


def test_other_kernels_keep_the_peaks_that_the_machine_has_shown(tmp_path, make_rates, monkeypatch):
    fast = make_rates(bandwidth=((4 << 20, 75e9),), int8_ops_per_s=90e9, op_s=1.0)
    slow = make_rates(bandwidth=((4 << 20, 57e9),), int8_ops_per_s=80e9, op_s=2.0)
    monkeypatch.setattr(rates_store, "native_version", lambda: "a" * 12)
    try_rates(tmp_path, 2, measure=lambda _: fast)
    monkeypatch.setattr(rates_store, "native_version", lambda: "b" * 12)
    (tmp_path / "machine" / next((tmp_path / "machine").iterdir()).name.replace("a" * 12, "c" * 12)).write_text("{")
    try_rates(tmp_path, 1, measure=lambda _: make_rates(bandwidth=((4 << 20, 99e9),)))
    kept = try_rates(tmp_path, 2, measure=lambda _: slow)
    assert (kept.bandwidth, kept.int8_ops_per_s, kept.op_s) == (((4 << 20, 75e9),), 90e9, 2.0)


def test_fresh_replaces_a_damaged_file(tmp_path, measure):
    try_rates(tmp_path, 2, measure=measure)
    (path,) = (tmp_path / "machine").iterdir()
    path.write_text("{")
    with pytest.raises(MeasureError, match="--fresh"):
        try_rates(tmp_path, 2, measure=measure)
    assert try_rates(tmp_path, 2, fresh=True, measure=measure) is not None


def test_other_threads_measure_again(tmp_path, measure):
    try_rates(tmp_path, 1, measure=measure)
    try_rates(tmp_path, 2, measure=measure)
    assert measure.asked == [1, 2]


def test_another_instruction_set_measures_again(tmp_path, measure, monkeypatch):
    monkeypatch.delenv("OPTIMC_ISA", raising=False)
    try_rates(tmp_path, 2, measure=measure)
    monkeypatch.setenv("OPTIMC_ISA", "portable")
    try_rates(tmp_path, 2, measure=measure)
    assert len(measure.asked) == 2


def test_other_kernels_and_other_machines_measure_again(tmp_path, machine, monkeypatch):
    from dataclasses import replace

    paths = {
        rates_path(tmp_path, machine, 2, "avx2", "aaa"),
        rates_path(tmp_path, machine, 2, "avx2", "bbb"),
        rates_path(tmp_path, replace(machine, cpu="another"), 2, "avx2", "aaa"),
        rates_path(tmp_path, replace(machine, cpu_quota=1.5), 2, "avx2", "aaa"),
    }
    assert len(paths) == 4


def test_a_damaged_file_is_refused_in_words(tmp_path, make_rates):
    path = tmp_path / "rates.json"
    save_rates(path, make_rates())
    assert load_rates(path) == make_rates()
    for damage in ("{", "[]", "{}", json.dumps({**make_rates().to_json(), "format": 0})):
        path.write_text(damage)
        with pytest.raises(MeasureError, match=r"not a machine's rates .*delete it, or measure with --fresh"):
            load_rates(path)


def test_a_file_that_cannot_be_read_is_refused_in_words(tmp_path):
    (tmp_path / "rates.json").mkdir()
    with pytest.raises(MeasureError, match=r"rates\.json: Is a directory"):
        load_rates(tmp_path / "rates.json")


def test_without_memory_to_measure_there_are_no_rates_and_that_is_said(tmp_path, measure, monkeypatch, capsys):
    monkeypatch.setattr(rates_store, "available_bytes", lambda: 1 << 30)
    assert try_rates(tmp_path, 2, measure=measure) is None
    assert measure.asked == []
    assert "1,024 MiB of memory are free, it takes 3,072" in capsys.readouterr().err
