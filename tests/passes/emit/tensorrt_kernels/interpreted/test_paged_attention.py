import numpy as np
import pytest

from optimc_passes.dialect.paged_attention import PagedAttention
from optimc_passes.dialect.paged_attention import paged_attention as dialect_attention
from optimc_passes.emit.tensorrt_kernels.paged_attention_reference import paged_attention

from .ragged_batches import make_batch, run_kernel

# Half weights and half answers: two roundings of 2^-11 (bfloat16: 2^-8) of numbers up to about 3.
TOLERANCE = {"float16": 3e-3, "bfloat16": 2.4e-2}


def spec(heads, kv_heads, head_dim, *, window=0, softcap=0.0):
    return PagedAttention(0, heads, kv_heads, head_dim, head_dim**-0.5, window, softcap)


def reference(batch):
    return paged_attention(batch.spec, batch.q.astype(np.float32), batch.step, **batch.caches)


def check(batch, **launch):
    got = run_kernel(batch, **launch)
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, reference(batch), atol=TOLERANCE[batch.half], rtol=0)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_every_head_size(head_dim):
    check(make_batch(np.random.default_rng(head_dim), spec(4, 2, head_dim), [1, 4], [21, 0]))


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8])
def test_every_group_of_heads(group):
    check(make_batch(np.random.default_rng(group), spec(2 * group, 2, 64), [1, 19, 1], [33, 5, 0]))


@pytest.mark.parametrize("window", [1, 7, 32])
@pytest.mark.parametrize("tree", [None, 8])
def test_windows_reach_into_the_context_and_into_the_step(window, tree):
    check(make_batch(np.random.default_rng(window), spec(4, 2, 64, window=window), [1, 20, 8], [40, 9, 30], tree=tree))


def test_softcap():
    check(make_batch(np.random.default_rng(0), spec(4, 2, 64, softcap=0.7), [1, 5], [21, 3]))


def test_trees_beside_a_prompt_too_long_for_the_mask():
    check(make_batch(np.random.default_rng(3), spec(4, 2, 64), [6, 30, 1, 8], [21, 4, 9, 0], tree=8))


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("splits", [None, 2])
def test_masks_and_positions_may_be_anything(window, splits):
    rng = np.random.default_rng(7)
    batch = make_batch(rng, spec(4, 2, 64, window=window), [20, 1, 16], [9, 4, 0], tree=20)
    step = batch.step
    for start, stop, context in zip(step.query_start, step.query_start[1:], step.context_len, strict=False):
        count = stop - start
        step.tree_mask[start:stop, :count] = (rng.random((count, count)) < 0.3) | np.eye(count, dtype=bool)
        step.positions[start:stop] = context + rng.permutation(count)
    check(batch, splits=splits, keys_tile=16)


@pytest.mark.parametrize("splits", [None, 4])
def test_tokens_of_no_sequence_are_left_alone(splits):
    batch = make_batch(np.random.default_rng(8), spec(4, 2, 64), [3, 2], [20, 7])
    want = reference(batch)
    got = run_kernel(batch, splits=splits, padding=3)
    np.testing.assert_allclose(got[:5], want, atol=TOLERANCE["float16"], rtol=0)
    if splits is None:
        assert np.isnan(got[5:]).all()


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.parametrize("pool", ["half", "int8", "fp8"])
def test_every_kind_of_pool(half, pool):
    check(make_batch(np.random.default_rng(1), spec(4, 2, 80), [1, 6], [35, 0], half=half, pool=pool))


def test_values_whose_scales_are_below_the_range_of_half_keep_their_precision():
    batch = make_batch(np.random.default_rng(2), spec(2, 2, 64), [1], [40], pool="int8")
    for name in ("step_values", "value_pool"):
        # 2^-22: float16's fourth smallest number. A weight times it is nothing in half.
        batch.caches[name].scales[:] = np.float16(2.0**-22)
    got, want = run_kernel(batch), reference(batch)
    # The answer itself is written in half, in steps of 2^-24.
    np.testing.assert_allclose(got, want, atol=2.0**-24, rtol=0)


@pytest.mark.parametrize("block_size", [1, 8, 16, 48])
def test_context_that_ends_anywhere_in_a_block(block_size):
    batch = make_batch(np.random.default_rng(0), spec(2, 1, 64), [1, 1, 1], [47, 48, 49], block_size=block_size)
    check(batch)


@pytest.mark.parametrize("splits", [1, 3, "plugin"])
@pytest.mark.parametrize(
    ("queries", "contexts", "options"),
    [
        ([1], [300], {}),
        ([1, 2, 1], [90, 0, 33], {"pool": "int8"}),
        ([5, 20], [70, 3], {"tree": 8}),
    ],
    ids=["one sequence", "several, one without context", "a tree and a prompt"],
)
def test_splits_give_what_one_part_gives(splits, queries, contexts, options):
    batch = make_batch(np.random.default_rng(0), spec(4, 2, 64, window=64), queries, contexts, **options)
    check(batch, splits=splits)


@pytest.mark.parametrize("splits", [None, 3])
def test_scores_may_be_far_beyond_what_exponentials_reach(splits):
    batch = make_batch(np.random.default_rng(4), spec(2, 2, 64), [1, 2], [90, 40])
    batch.q[:] = batch.q * np.float16(300)
    check(batch, splits=splits)


@pytest.mark.parametrize("queries_tile", [16, 64])
def test_answers_do_not_depend_on_how_sequences_share_tiles(queries_tile):
    batch = make_batch(np.random.default_rng(0), spec(4, 2, 64), [3, 1, 1, 17, 2, 9], [5, 0, 31, 16, 7, 40])
    check(batch, queries_tile=queries_tile, keys_tile=16)


def test_padding_in_pool_and_table_is_never_read():
    batch = make_batch(np.random.default_rng(0), spec(2, 2, 64), [1, 3], [17, 2])
    step = batch.step
    used = {
        int(step.block_table[b, key // step.block_size]) * step.block_size + key % step.block_size
        for b, context in enumerate(step.context_len)
        for key in range(context)
    }
    unused = [row for row in range(len(batch.caches["key_pool"].codes)) if row not in used]
    for name in ("key_pool", "value_pool"):
        batch.caches[name].codes[unused] = np.nan
    check(batch)


def test_the_reference_is_the_dialects_attention():
    batch = make_batch(np.random.default_rng(5), spec(4, 2, 64, window=9, softcap=3.0), [2, 6], [19, 4], tree=8)
    step, caches = batch.step, {name: cache.numbers() for name, cache in batch.caches.items()}
    counts = np.diff(step.query_start)
    places = np.concatenate([c + np.arange(n) for c, n in zip(step.context_len, counts, strict=True)])
    blocks = step.block_table[np.repeat(np.arange(len(counts)), counts), places // step.block_size]
    want = dialect_attention(
        batch.spec,
        batch.q.astype(np.float32),
        caches["step_keys"],
        caches["step_values"],
        key_pool=caches["key_pool"],
        value_pool=caches["value_pool"],
        slots=blocks.astype(np.int64) * step.block_size + places % step.block_size,
        positions=step.positions,
        query_start=step.query_start,
        context_len=step.context_len,
        block_table=step.block_table,
        block_size=step.block_size,
        tree_mask=step.tree_mask,
    )
    np.testing.assert_allclose(reference(batch), want, atol=1e-6, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_random_ragged_batches(seed):
    rng = np.random.default_rng(1000 + seed)
    group, kv_heads = int(rng.integers(1, 9)), int(rng.integers(1, 4))
    head_dim = int(rng.choice([64, 80, 96, 112, 128, 192, 256]))
    window = int(rng.choice([0, 0, 1, 5, 33, 100]))
    softcap = float(rng.choice([0.0, 0.0, 2.0, 30.0]))
    sequences = int(rng.integers(1, 7))
    queries = rng.choice([1, 1, 2, 7, 16, 40], sequences)
    contexts = rng.choice([0, 1, 15, 16, 17, 100, 250], sequences)
    batch = make_batch(
        rng,
        spec(group * kv_heads, kv_heads, head_dim, window=window, softcap=softcap),
        queries,
        contexts,
        block_size=int(rng.choice([8, 16, 32])),
        half=str(rng.choice(["float16", "bfloat16"])),
        pool=str(rng.choice(["half", "int8", "fp8"])),
        tree=rng.choice([None, 16]),
    )
    check(
        batch,
        splits=[None, 1, 2, 9, "plugin"][rng.integers(5)],
        queries_tile=int(rng.choice([16, 64])),
        keys_tile=int(rng.choice([16, 32, 64])),
    )
