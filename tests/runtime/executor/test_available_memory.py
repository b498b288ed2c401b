"""What is free: of the machine, or of the control group if that is less."""

from pathlib import Path

import pytest

from optimc_runtime.executor.available_memory import available_bytes


@pytest.fixture
def free(tmp_path: Path):
    def ask(meminfo: str = "MemTotal: 9 kB\nMemAvailable:   1000 kB\n", **group: str) -> int | None:
        (tmp_path / "meminfo").write_text(meminfo)
        for name, text in group.items():
            (tmp_path / f"memory.{name}").write_text(text)
        return available_bytes(tmp_path / "meminfo", tmp_path)

    return ask


def test_without_a_control_group_it_is_the_machines(free):
    assert free() == 1000 * 1024
    assert free(max="max\n", current="5\n") == 1000 * 1024


def test_a_control_groups_limit_counts_where_it_leaves_less(free):
    assert free(max="5000\n", current="2000\n") == 3000
    assert free(max="5000000\n", current="2000\n") == 1000 * 1024
    assert free(max="500\n", current="900\n") == 0


def test_cached_files_that_the_kernel_gives_up_first_are_free(free):
    assert free(max="5000\n", current="4000\n", stat="anon 1000\nactive_file 1200\ninactive_file 1800\n") == 2800


def test_where_the_machine_does_not_say_nobody_guesses(free, tmp_path):
    assert free(meminfo="MemTotal: 9 kB\n", max="5000\n", current="0\n") is None
    assert available_bytes(tmp_path / "absent") is None
