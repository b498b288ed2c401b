"""The model agrees with the runtime's own pool and cache, evictions included."""

import random

import numpy as np
import pytest

from optimc.measure.prefix.cache_model import simulate
from optimc_runtime.block_pool import BlockPool
from optimc_runtime.prefix_cache import PrefixCache

SIZE = 4


def served(prompts, num_blocks):
    """Cached tokens of each prompt in the runtime, one after the other, as the scheduler does it."""
    pool = BlockPool(num_blocks, SIZE)
    cache = PrefixCache(pool, "engine")
    cached = []
    for prompt in prompts:
        tokens = np.array(prompt, np.int64)
        nodes = cache.match(tokens[: len(tokens) - 1], ())
        hits = [node.block for node in nodes]
        for block in hits:
            pool.share(block)
        lease = cache.lease(nodes, ())
        fresh = pool.allocate(-(-len(tokens) // SIZE) - len(hits))
        assert fresh is not None
        blocks = [*hits, *fresh]
        for at in range(len(hits), len(tokens) // SIZE):
            if lease is not None:
                lease = cache.publish(lease, tokens[at * SIZE : (at + 1) * SIZE], blocks[at])
        pool.free(blocks)
        if lease is not None:
            cache.release(lease)
        cache.check_integrity()
        cached.append(len(hits) * SIZE)
    return cached


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("num_blocks", [8, 13, 1000])
def test_the_model_hits_what_the_runtime_hits(seed, num_blocks):
    draw = random.Random(seed)
    prompts = [[draw.randrange(2) for _ in range(draw.randrange(1, 8 * SIZE))] for _ in range(80)]
    sequences = [np.array(prompt, np.int32) for prompt in prompts]
    capacity = None if num_blocks == 1000 else num_blocks * SIZE
    assert simulate(sequences, SIZE, capacity_tokens=capacity) == served(prompts, num_blocks)


def test_a_prompt_is_never_cached_whole():
    prompt = np.arange(8, dtype=np.int32)
    # Two full blocks, but the last token has to be computed: the second block does not count.
    assert simulate([prompt, prompt], SIZE) == [0, 4]


def test_units_are_as_many_per_token_as_is_said():
    text = np.arange(40, dtype=np.int32)
    # 40 characters are 10 tokens of 4: two blocks of 4 tokens, 32 characters.
    assert simulate([text, text], SIZE, units_per_token=[4, 4]) == [0, 32]


def test_what_does_not_fit_leaves_nothing():
    short, long = np.arange(8, dtype=np.int32), np.arange(40, dtype=np.int32)
    assert simulate([short, long, short], SIZE, capacity_tokens=12) == [0, 0, 4]
