"""How many blocks fit, and what is refused before the memory is asked for."""

import os
from pathlib import Path

import pytest

from optimc.errors import PlanTargetError
from optimc_runtime.executor.pool_memory import check_pool_memory

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
