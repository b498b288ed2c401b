"""Processor time and memory from /proc."""

import os

import pytest

from optimc.errors import ConfigError
from optimc.measure.load.resources import ResourceMeter, Resources


def write(folder, *, ticks, pages):
    folder.mkdir(parents=True, exist_ok=True)
    fields = ["S", *["0"] * 10, str(ticks), "0", *["0"] * 5]
    (folder / "stat").write_text(f"7 (a (name) b) {' '.join(fields)}")
    (folder / "statm").write_text(f"999 {pages} 1 1 0 1 0")


def test_processor_time_and_memory_are_those_of_the_process(tmp_path, monkeypatch):
    write(tmp_path / "7", ticks=100, pages=1000)
    times = iter([10.0, 12.0])  # the load takes 2 s
    monkeypatch.setattr("optimc.measure.load.resources.time.monotonic", lambda: next(times))
    monkeypatch.setattr("optimc.measure.load.resources.os.sched_getaffinity", lambda pid: {0, 1})
    meter = ResourceMeter.of_server(7, tmp_path)
    meter._watch = lambda: meter._stopped.wait()  # one look by hand, no timer
    meter._thread._target = meter._watch
    meter.start()
    meter._rss_peak_bytes = meter._rss_bytes()
    hertz = os.sysconf("SC_CLK_TCK")
    write(tmp_path / "7", ticks=100 + 3 * hertz, pages=10)  # 3 s of processor time in 2 s on 2 cores
    found = meter.stop()
    assert found == Resources(0.75, 1000 * os.sysconf("SC_PAGE_SIZE"), "server pid 7")


def test_the_cores_are_those_of_the_process_that_is_watched(tmp_path, monkeypatch):
    write(tmp_path / "7", ticks=100, pages=1000)
    times = iter([10.0, 12.0])
    monkeypatch.setattr("optimc.measure.load.resources.time.monotonic", lambda: next(times))
    monkeypatch.setattr("optimc.measure.load.resources.os.sched_getaffinity", lambda pid: {0} if pid == 7 else {0, 1})
    meter = ResourceMeter.of_server(7, tmp_path)
    meter.start()
    write(tmp_path / "7", ticks=100 + 2 * os.sysconf("SC_CLK_TCK"), pages=10)
    assert meter.stop().cpu_share == 1.0


def test_this_process_has_used_some_memory():
    meter = ResourceMeter.of_this_process()
    meter.start()
    found = meter.stop()
    assert found.rss_peak_bytes > 1 << 20
    assert found.scope == "this process"


def test_a_server_nobody_can_look_into_is_unknown():
    meter = ResourceMeter.of_server(None)
    meter.start()
    assert meter.stop() == Resources(None, None, "unknown")
    assert "--server-pid" in str(meter.stop())


def test_a_process_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="there is no process 7 on this machine"):
        ResourceMeter.of_server(7, tmp_path)


def test_a_process_that_ends_meanwhile_is_unknown(tmp_path):
    write(tmp_path / "7", ticks=100, pages=1000)
    meter = ResourceMeter.of_server(7, tmp_path)
    meter.start()
    for name in ("stat", "statm"):
        (tmp_path / "7" / name).unlink()
    assert meter.stop() == Resources(None, None, "server pid 7")
