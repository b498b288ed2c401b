"""How many blocks fit, and what is refused before the memory is asked for."""

import os
from pathlib import Path

import pytest

from optimc.errors import PlanTargetError
from optimc_runtime.executor.pool_memory import check_pool_memory, may_populate

PLAN = Path("engine.plan")


@pytest.fixture(autouse=True)
def machine_of_a_megabyte(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"SC_PHYS_PAGES": 256, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(os, "sysconf", sizes.__getitem__)


@pytest.mark.parametrize(("memory", "blocks"), [(1000, 1), (1999, 1), (2000, 2), (1 << 20, 1048)])
def test_whole_blocks_count(memory: int, blocks: int) -> None:
    assert check_pool_memory(PLAN, memory, bytes_per_block=1000, block_size=16) == blocks


def test_memory_for_less_than_a_block_is_refused_with_both_sizes() -> None:
    with pytest.raises(PlanTargetError, match=r"engine\.plan: .* 999 bytes .* 16 tokens takes 1,000 bytes, raise"):
        check_pool_memory(PLAN, 999, bytes_per_block=1000, block_size=16)


def test_memory_beyond_the_machines_is_refused_with_both_sizes() -> None:
    with pytest.raises(PlanTargetError, match=r"engine\.plan: .* 1,048,577 bytes exceeds .* 1,048,576; lower"):
        check_pool_memory(PLAN, (1 << 20) + 1, bytes_per_block=1000, block_size=16)


def system(root: Path, available_kib: int | None, limit: str | None = None, used: str = "0") -> Path:
    """A machine's proc/ and sys/."""
    if available_kib is not None:
        (root / "proc").mkdir()
        (root / "proc/meminfo").write_text(f"MemTotal: 9999999 kB\nMemAvailable:   {available_kib} kB\nBuffers: 1 kB\n")
    if limit is not None:
        (root / "sys/fs/cgroup").mkdir(parents=True)
        (root / "sys/fs/cgroup/memory.max").write_text(f"{limit}\n")
        (root / "sys/fs/cgroup/memory.current").write_text(f"{used}\n")
    return root


def test_memory_beyond_the_control_groups_is_refused_too(tmp_path: Path) -> None:
    root = system(tmp_path, available_kib=1000, limit="5000")
    assert check_pool_memory(PLAN, 5000, bytes_per_block=1000, block_size=16, root=root) == 5
    with pytest.raises(PlanTargetError, match=r"5,001 bytes exceeds this control group's 5,000; lower kv_memory"):
        check_pool_memory(PLAN, 5001, bytes_per_block=1000, block_size=16, root=root)


@pytest.mark.parametrize(("pool", "may"), [(500 * 1024, True), (500 * 1024 + 1, False)])
def test_a_pool_is_taken_at_once_where_twice_as_much_is_free(tmp_path: Path, pool: int, may: bool) -> None:
    assert may_populate(pool, system(tmp_path, available_kib=1000)) is may


@pytest.mark.parametrize(
    ("limit", "used", "may"), [("max", "0", True), ("2000", "0", True), ("2000", "1", False), ("500", "900", False)]
)
def test_the_control_groups_limit_counts(tmp_path: Path, limit: str, used: str, may: bool) -> None:
    assert may_populate(1000, system(tmp_path, available_kib=1000, limit=limit, used=used)) is may


def test_where_nothing_says_what_is_free_nothing_is_taken_at_once(tmp_path: Path) -> None:
    assert not may_populate(1, system(tmp_path, available_kib=None))
