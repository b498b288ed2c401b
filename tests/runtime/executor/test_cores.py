"""One thread per physical core the process may use."""

import os
from pathlib import Path

import pytest

from optimc_runtime.executor.cores import usable_cores

SIBLINGS = {0: "0,2\n", 1: "1,3\n", 2: "0,2\n", 3: "1,3\n"}
"""Two cores with two threads each, as Linux lists them."""


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(path: Path, encoding: str) -> str:
        assert path.name == "thread_siblings_list"
        return SIBLINGS[int(path.parts[-3].removeprefix("cpu"))]

    monkeypatch.setattr(Path, "read_text", read)


@pytest.mark.parametrize(("cpus", "cores"), [({0, 1, 2, 3}, 2), ({0, 2}, 1), ({0, 3}, 2), ({1}, 1)])
@pytest.mark.usefixtures("machine")
def test_threads_of_one_core_count_once(monkeypatch: pytest.MonkeyPatch, cpus: set[int], cores: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: cpus, raising=False)
    assert usable_cores() == cores


def test_without_a_topology_every_cpu_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(_path: Path, _encoding: str) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", absent)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {4, 5, 6}, raising=False)
    assert usable_cores() == 3


def test_a_system_without_affinity_counts_all_its_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert usable_cores() == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores() == 1
