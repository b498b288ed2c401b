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


def test_without_memory_to_measure_there_are_no_rates_and_that_is_said(tmp_path, measure, monkeypatch, capsys):
    monkeypatch.setattr(rates_store, "_available_bytes", lambda: 1 << 30)
    assert try_rates(tmp_path, 2, measure=measure) is None
    assert measure.asked == []
    assert "1,024 MiB of memory are free, it takes 3,072" in capsys.readouterr().err
