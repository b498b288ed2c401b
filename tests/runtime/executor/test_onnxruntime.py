"""The executor against the tiny decoder in NumPy: any way of stepping gives the same logits."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from optimc.plan import Plan
from optimc_passes.dialect import PagedAttention
from optimc_runtime.executor.base import Executor
from optimc_runtime.executor.load import load_executor

ATOL = 1e-5
"""Logits are of order 10; float32 sums over a few dozen terms in another order differ by less."""


def draw_tokens(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50, count)


def poison(executor: Any, value: float) -> None:
    """Fill every slot, but not the row that padding reads."""
    for pool in (*executor._key_pools, *executor._value_pools):
        pool[:-1] = value


@pytest.fixture(scope="module")
def decoder(tiny_decoder: Any) -> Any:
    return tiny_decoder()


@pytest.fixture(scope="module")
def executors(decoder: Any, make_plan: Callable[..., Plan]) -> dict[int, Executor]:
    return {size: load_executor(make_plan(decoder, size), threads=1) for size in (1, 4, 16)}


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=ATOL * np.abs(expected).max())


@pytest.mark.parametrize(
    "spec",
    [
        PagedAttention(0, 4, 4, 8, 0.35),
        PagedAttention(0, 4, 1, 8, 0.35, softcap=1.0),
        PagedAttention(0, 4, 2, 24, 0.2),
        PagedAttention(0, 4, 2, 8, 0.35, window=8),
    ],
    ids=["mha", "mqa-softcap", "dim24", "window"],
)
def test_one_shot_equals_numpy(
    tiny_decoder: Any, make_plan: Callable[..., Plan], cache_type: Any, spec: PagedAttention
) -> None:
    decoder = tiny_decoder(spec)
    executor = load_executor(make_plan(decoder), threads=1)
    for length in (1, 7, 8, 9, 17):
        tokens = draw_tokens(length)
        step = cache_type(16, 4).step([("a", tokens)])
        assert_close(executor.execute(step).logits, decoder.forward(tokens))


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [1, 3, 8, 16, 36, 37])
def test_chunks_and_batch_mates_do_not_change_the_answer(
    decoder: Any, executors: dict[int, Executor], cache_type: Any, block_size: int, chunk: int
) -> None:
    executor, tokens = executors[block_size], draw_tokens(37)
    expected = decoder.forward(tokens)
    mates = {f"mate{i}": draw_tokens(37, seed=i + 1) for i in range(7)}
    mate_logits = {name: decoder.forward(mate) for name, mate in mates.items()}
    for num_mates, fill in ((0, np.nan), (1, 1e4), (7, np.nan)):
        poison(executor, fill)
        cache = cache_type(executor.pool.num_blocks, block_size, seed=chunk)
        # Mates are in every phase: some decode by one token, some prefill, one has just begun.
        begun = [(name, mate[: 3 * i]) for i, (name, mate) in enumerate(mates.items()) if 0 < i < num_mates]
        if begun:
            executor.execute(cache.step(begun, rows=[]))
        for start in range(0, 37, chunk):
            part = tokens[start : start + chunk]
            work = [("a", part)]
            for i, (name, mate) in enumerate(list(mates.items())[:num_mates]):
                done = cache.length.get(name, 0)
                if done < 37:
                    more = (name, mate[done : done + (1 if i % 2 else 5)])
                    work.insert(0 if i % 3 else len(work), more)
            step = cache.step(work)
            logits = executor.execute(step).logits
            first = step.query_start[[name for name, _ in work].index("a")]
            assert_close(logits[first : first + len(part)], expected[start : start + len(part)])
            for b, (name, mate_tokens) in enumerate(work):
                if name != "a":
                    stop = cache.length[name]
                    found = logits[step.query_start[b] : step.query_start[b + 1]]
                    assert_close(found, mate_logits[name][stop - len(mate_tokens) : stop])


def test_only_asked_rows_come_back_in_order(decoder: Any, executors: dict[int, Executor], cache_type: Any) -> None:
    work = [("a", draw_tokens(30, 1)), ("b", draw_tokens(1, 2)), ("c", draw_tokens(9, 3)), ("d", draw_tokens(1, 4))]
    full = np.concatenate([decoder.forward(tokens) for _, tokens in work])
    for rows in ([], [30], [29, 30, 39, 40], [0, 5, 33, 40]):
        step = cache_type(64, 4).step(work, rows=rows)
        logits = executors[4].execute(step).logits
        assert logits.shape == (len(rows), 50)
        if rows:
            assert_close(logits, full[rows])


def test_a_step_writes_its_own_slots_only(executors: dict[int, Executor], cache_type: Any) -> None:
    executor: Any = executors[4]
    poison(executor, np.nan)
    step = cache_type(64, 4).step([("a", draw_tokens(30)), ("b", draw_tokens(2)), ("c", draw_tokens(3))], rows=[])
    executor.execute(step)
    for pool in (*executor._key_pools, *executor._value_pools):
        written = np.isfinite(pool[:-1]).all(axis=1)
        np.testing.assert_array_equal(np.flatnonzero(written), np.sort(step.slots))
        assert not pool[-1].any()


def test_another_sequences_nan_stays_with_it(decoder: Any, executors: dict[int, Executor], cache_type: Any) -> None:
    executor: Any = executors[4]
    cache = cache_type(64, 4)
    sick, well = draw_tokens(5, 1), draw_tokens(12, 2)
    executor.execute(cache.step([("sick", sick), ("well", well[:11])], rows=[]))
    executor._value_pools[0][cache.blocks["sick"][0] * 4] = np.nan
    logits = executor.execute(cache.step([("sick", sick[:1]), ("well", well[11:])])).logits
    assert np.isnan(logits[0]).all()
    assert_close(logits[1:], decoder.forward(well)[11:])


def test_tree_nodes_equal_the_sequences_they_stand_for(tiny_decoder: Any, make_plan: Any, cache_type: Any) -> None:
    decoder = tiny_decoder(PagedAttention(0, 4, 2, 8, 0.35), PagedAttention(1, 4, 2, 8, 0.35, window=4))
    executor = load_executor(make_plan(decoder), threads=1)
    cache = cache_type(64, 4)
    prompt, nodes = draw_tokens(6, 1), draw_tokens(5, 2)
    executor.execute(cache.step([("a", prompt), ("b", prompt[:3])], rows=[]))
    # Root 0 with children 1 and 2; 2 has children 3 and 4. Beside it a sequence that only has a root and one child.
    step = cache.step([("b", nodes[:2]), ("a", nodes)])
    paths = [[0], [0, 1], [0], [0, 1], [0, 2], [0, 2, 3], [0, 2, 4]]
    tree = np.zeros((7, 5), bool)
    for token, path in enumerate(paths):
        tree[token, path] = True
    depth = np.array([len(path) - 1 for path in paths])
    step = replace(step, tree_mask=tree, positions=np.where(np.arange(7) < 2, 3, 6) + depth)
    logits = executor.execute(step).logits
    for token, path in enumerate(paths):
        history = prompt[:3] if token < 2 else prompt
        assert_close(logits[token], decoder.forward(np.concatenate([history, nodes[path]]))[-1])


def test_accepted_tree_nodes_move_and_decoding_goes_on(
    decoder: Any, executors: dict[int, Executor], cache_type: Any
) -> None:
    executor = executors[4]
    poison(executor, np.nan)
    cache = cache_type(64, 4)
    prompt, nodes = draw_tokens(6, 1), draw_tokens(3, 2)
    executor.execute(cache.step([("a", prompt)], rows=[]))
    step = cache.step([("a", nodes)])
    tree = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], bool)
    executor.execute(replace(step, tree_mask=tree, positions=np.array([6, 7, 7])))
    executor.move(step.slots[2:3], step.slots[1:2])
    cache.length["a"] = 8
    logits = executor.execute(cache.step([("a", np.array([11]))])).logits
    history = np.concatenate([prompt, nodes[[0, 2]], [11]])
    assert_close(logits, decoder.forward(history)[-1:])


def test_move_reads_all_before_it_writes(executors: dict[int, Executor]) -> None:
    executor: Any = executors[4]
    pool = executor._key_pools[0]
    pool[:4] = np.arange(4)[:, None]
    executor.move(np.array([0, 1, 2]), np.array([1, 2, 3]))
    np.testing.assert_array_equal(pool[:4, 0], [0, 0, 1, 2])


def test_the_pool_is_as_large_as_the_memory_given(decoder: Any, make_plan: Callable[..., Plan]) -> None:
    plan = make_plan(decoder, 4)
    # Two layers, keys and values, 4 slots, 2 heads of 8 floats.
    bytes_per_block = 2 * 2 * 4 * 16 * 4
    executor = load_executor(plan, kv_memory_bytes=10 * bytes_per_block + 5, threads=1)
    assert (executor.pool.num_blocks, executor.pool.block_size, executor.pool.bytes_per_block) == (
        10,
        4,
        bytes_per_block,
    )
    assert load_executor(plan, threads=1).pool.num_blocks == (1 << 20) // bytes_per_block


def test_a_closed_executor_lets_go_of_its_pool(decoder: Any, make_plan: Callable[..., Plan], cache_type: Any) -> None:
    executor = load_executor(make_plan(decoder), threads=1)
    executor.close()
    with pytest.raises(AssertionError, match="closed"):
        executor.execute(cache_type(4, 4).step([("a", draw_tokens(2))]))
