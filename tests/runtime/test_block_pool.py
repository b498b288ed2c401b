import random

import pytest

from optimc_runtime.block_pool import BlockPool


def test_scarcity_is_a_value_and_changes_nothing():
    pool = BlockPool(4, 16)
    assert pool.allocate(5) is None
    assert pool.num_available == 4
    assert sorted(pool.allocate(4)) == [0, 1, 2, 3]
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []
    pool.check_integrity()


def test_a_double_free_raises():
    pool = BlockPool(2, 16)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(ValueError, match="block 0 is freed twice"):
        pool.free(blocks)


def test_sharing_a_block_that_is_not_cached_raises():
    pool = BlockPool(2, 16)
    (block,) = pool.allocate(1)
    with pytest.raises(ValueError, match="not cached"):
        pool.share(block)


def test_a_shared_block_is_free_only_after_its_last_reference():
    pool = BlockPool(2, 16)
    (block,) = pool.allocate(1)
    pool.keep(block)
    pool.share(block)
    pool.free([block])
    assert (pool.refcount(block), pool.num_cached_idle) == (1, 0)
    pool.free([block])
    assert (pool.refcount(block), pool.num_cached_idle, pool.num_free) == (0, 1, 1)
    pool.check_integrity()


def test_free_blocks_are_handed_out_before_cached_ones_and_those_by_age_tail_first():
    pool = BlockPool(5, 16)
    old, young = pool.allocate(2), pool.allocate(2)
    for block in (*old, *young):
        pool.keep(block)
    pool.free(old)
    pool.free(young)
    evicted = []
    pool.on_evict = evicted.append
    assert pool.allocate(1) == [4]
    assert evicted == []
    assert pool.allocate(3) == [old[1], old[0], young[1]] == evicted
    pool.check_integrity()


def test_a_hit_makes_an_idle_block_young_again():
    pool = BlockPool(2, 16)
    first, second = pool.allocate(2)
    for block in (first, second):
        pool.keep(block)
    pool.free([first])
    pool.free([second])
    pool.share(first)
    pool.free([first])
    assert pool.allocate(1) == [second]


def test_forgetting_an_idle_block_frees_it():
    pool = BlockPool(2, 16)
    (block,) = pool.allocate(1)
    pool.keep(block)
    pool.free([block])
    pool.forget(block)
    assert (pool.num_cached_idle, pool.num_free) == (0, 2)
    pool.check_integrity()


def test_the_same_calls_give_the_same_ids():
    def play(seed: int) -> list:
        rng = random.Random(seed)
        pool, held, log = BlockPool(16, 4), [], []
        for _ in range(500):
            if rng.random() < 0.5:
                blocks = pool.allocate(rng.randrange(4))
                log.append(blocks)
                if blocks:
                    held.append(blocks)
                    if rng.random() < 0.5:
                        pool.keep(blocks[0])
            elif held:
                pool.free(held.pop(rng.randrange(len(held))))
            pool.check_integrity()
        return log

    assert play(1) == play(1)


def test_the_integrity_check_sees_a_leak():
    pool = BlockPool(2, 16)
    pool.allocate(1)
    pool._refcount[0] = 0
    with pytest.raises(AssertionError, match=r"1 free \+ 0 referenced \+ 0 cached-idle != 2"):
        pool.check_integrity()
