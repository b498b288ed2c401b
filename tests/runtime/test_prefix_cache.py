import numpy as np

from optimc_runtime.block_pool import BlockPool
from optimc_runtime.prefix_cache import PrefixCache, chain_hash


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int64)


def publish(cache: PrefixCache, pool: BlockPool, tokens, extras=()) -> list[int]:
    """Compute `tokens` as one sequence that then ends; return its blocks."""
    blocks = pool.allocate(len(tokens) // 2)
    lease = cache.lease([], extras)
    for i, block in enumerate(blocks):
        if lease is not None:
            lease = cache.publish(lease, tokens[2 * i : 2 * i + 2], block)
    if lease is not None:
        cache.release(lease)
    pool.free(blocks)
    cache.check_integrity()
    pool.check_integrity()
    return blocks


def hits(cache: PrefixCache, tokens, extras=()) -> list[int]:
    return [node.block for node in cache.match(tokens, extras)]


def make(num_blocks: int = 16, **options) -> tuple[PrefixCache, BlockPool]:
    pool = BlockPool(num_blocks, 2)
    return PrefixCache(pool, "engine", **options), pool


def test_finds_the_longest_prefix_of_full_blocks():
    cache, pool = make()
    blocks = publish(cache, pool, ids(1, 2, 3, 4, 5, 6))
    assert hits(cache, ids(1, 2, 3, 4, 5, 6)) == blocks
    assert hits(cache, ids(1, 2, 3, 4, 5)) == blocks[:2]
    assert hits(cache, ids(1, 2, 3, 9, 5, 6)) == blocks[:1]
    assert hits(cache, ids(1)) == []


def test_an_equal_block_behind_another_prefix_is_no_hit():
    cache, pool = make()
    publish(cache, pool, ids(1, 2, 3, 4))
    assert len(hits(cache, ids(7, 7, 3, 4))) == 0
    assert hits(cache, ids(3, 4)) == []


def test_extras_are_told_apart_by_kind_and_value():
    cache, pool = make()
    publish(cache, pool, ids(1, 2), (("salt", "x"),))
    assert hits(cache, ids(1, 2), (("adapter", "x"),)) == []
    assert hits(cache, ids(1, 2)) == []
    assert len(hits(cache, ids(1, 2), (("salt", "x"),))) == 1
    publish(cache, pool, ids(1, 2), (("adapter", "x"),))
    publish(cache, pool, ids(1, 2))
    found = [hits(cache, ids(1, 2), extras)[0] for extras in ((("salt", "x"),), (("adapter", "x"),), ())]
    assert len(set(found)) == 3


def test_keys_depend_on_the_engine_and_on_where_a_value_ends():
    keys = set()
    for engine, extras in (("a", ()), ("b", ()), ("a", (("salt", "xy"),)), ("a", (("saltx", "y"),))):
        keys.add(PrefixCache(BlockPool(1, 2), engine).lease([], extras).key)
    assert len(keys) == 4


def test_colliding_hashes_cost_hits_but_never_answer_wrong():
    cache, pool = make(block_hash=lambda *_: 7)
    first = publish(cache, pool, ids(1, 2, 3, 4))
    publish(cache, pool, ids(5, 6, 3, 4))
    assert hits(cache, ids(1, 2, 3, 4)) == first[:1]
    assert hits(cache, ids(1, 2, 1, 2)) == first[:1]  # the second block has the key and tokens, not the parent
    assert hits(cache, ids(5, 6, 3, 4)) == []
    assert hits(cache, ids(1, 2), (("salt", "x"),)) == []


def test_eviction_removes_the_key_before_the_block_is_reused():
    cache, pool = make(num_blocks=2)
    publish(cache, pool, ids(1, 2, 3, 4))
    (reused,) = pool.allocate(1)
    assert reused not in hits(cache, ids(1, 2, 3, 4))
    assert len(hits(cache, ids(1, 2, 3, 4))) == 1
    pool.free([reused])
    pool.allocate(2)
    assert len(cache) == 0
    cache.check_integrity()
    assert not cache._nodes
    assert not cache._roots


def test_a_block_evicted_from_the_middle_hides_what_follows_until_it_is_published_again():
    cache, pool = make(num_blocks=4)
    blocks = publish(cache, pool, ids(1, 2, 3, 4))
    pool.share(blocks[1])  # somebody holds the second block only
    others = pool.allocate(3)  # evicts the first
    assert hits(cache, ids(1, 2, 3, 4)) == []
    cache.check_integrity()
    pool.free(others)
    lease = cache.lease([], ())
    (again,) = pool.allocate(1)
    lease = cache.publish(lease, ids(1, 2), again)
    assert hits(cache, ids(1, 2, 3, 4)) == [again, blocks[1]]
    cache.release(lease)
    cache.check_integrity()


def test_a_second_block_of_equal_content_stays_private():
    cache, pool = make()
    first = publish(cache, pool, ids(1, 2))
    second = pool.allocate(1)
    lease = cache.publish(cache.lease([], ()), ids(1, 2), second[0])
    cache.release(lease)
    pool.free(second)
    assert hits(cache, ids(1, 2)) == first
    assert pool.num_cached_idle == 1


def test_clear_forgets_everything_and_frees_idle_blocks():
    cache, pool = make()
    publish(cache, pool, ids(1, 2, 3, 4))
    cache.clear()
    assert hits(cache, ids(1, 2, 3, 4)) == []
    assert pool.num_free == 16
    cache.check_integrity()


def test_the_hash_chains_parent_and_content():
    assert chain_hash(b"a", b"b") != chain_hash(b"b", b"b") != chain_hash(b"b", b"a")
    assert len(chain_hash(b"", b"")) == 32
