"""Any way of stepping answers what ONNX Runtime's executor does, but for the half precision the engine computes in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from optimc.plan import Plan
from optimc_passes.dialect import PagedAttention
from optimc_runtime.executor.base import Executor, StepPlan
from optimc_runtime.executor.load import load_executor

HALF = 2e-3
"""Of the largest logit. Half numbers have 11 bits: each of some ten roundings on the way is off by 2^-12 of its value
at most; what is found is below half of this."""

INT8 = 1e-2
"""Codes are off by 1/254 of the largest number of their head at most, in keys and values of both layers."""


def draw_tokens(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50, count)


def assert_close(found: np.ndarray, expected: np.ndarray, tolerance: float = HALF) -> None:
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=tolerance * np.abs(expected).max())


@pytest.fixture(scope="module")
def decoder(tiny_decoder: Any) -> Any:
    return tiny_decoder()


@pytest.fixture(scope="module")
def plan(decoder: Any, tensorrt_plan: Callable[..., Plan]) -> Plan:
    return tensorrt_plan(decoder)


@pytest.fixture(scope="module")
def reference(decoder: Any, make_plan: Callable[..., Plan]) -> Executor:
    return load_executor(make_plan(decoder, 4), threads=1)


def test_a_prompt(plan: Plan, machine: Any, reference: Executor, cache_type: Any) -> None:
    executor = machine.load(plan)
    for length in (1, 5, 16, 17, 40):
        step = cache_type(64, 4).step([("a", draw_tokens(length))])
        assert_close(executor.execute(step).logits, reference.execute(step).logits)


@pytest.mark.parametrize("chunk", [1, 3, 16, 17, 36, 37])
def test_chunks_and_batch_mates(plan: Plan, machine: Any, reference: Executor, cache_type: Any, chunk: int) -> None:
    executor = machine.load(plan)
    cache = cache_type(96, 4, seed=chunk)
    tokens = draw_tokens(37)
    mates = {f"mate{i}": draw_tokens(37, seed=i + 1) for i in range(7)}
    for start in range(0, 37, chunk):
        work = [("a", tokens[start : start + chunk])]
        room = 64 - chunk
        for i, (name, mate) in enumerate(mates.items()):
            done = cache.length.get(name, 0)
            # Mates are in every phase: some decode by one token, some read chunks of either kind of call.
            more = mate[done : done + (1, 5, 20)[i % 3]]
            if len(more) and len(more) <= room:
                room -= len(more)
                work.insert(0 if i % 2 else len(work), (name, more))
        step = cache.step(work)
        assert_close(executor.execute(step).logits, reference.execute(step).logits)


def test_only_asked_rows_come_back_in_order(plan: Plan, machine: Any, reference: Executor, cache_type: Any) -> None:
    executor = machine.load(plan)
    work = [("a", draw_tokens(30, 1)), ("b", draw_tokens(1, 2)), ("c", draw_tokens(9, 3)), ("d", draw_tokens(20, 4))]
    for rows in ([], [30], [29, 30, 39, 40], [0, 5, 33, 40, 41, 59]):
        step = cache_type(64, 4).step(work, rows=rows)
        logits = executor.execute(step).logits
        assert logits.shape == (len(rows), 50)
        if rows:
            assert_close(logits, reference.execute(step).logits)


def with_tree(step: StepPlan, paths: list[list[int]], contexts: list[int]) -> StepPlan:
    """The step, token t of which sees the tokens paths[t] and stands at contexts[t] plus its depth."""
    tree = np.zeros((len(paths), max(max(path) for path in paths) + 1), bool)
    for token, path in enumerate(paths):
        tree[token, path] = True
    return replace(
        step, tree_mask=tree, positions=np.array([c + len(p) - 1 for c, p in zip(contexts, paths, strict=True)])
    )


def test_trees(tiny_decoder: Any, tensorrt_plan: Any, make_plan: Any, machine: Any, cache_type: Any) -> None:
    decoder = tiny_decoder(PagedAttention(0, 4, 2, 8, 0.35), PagedAttention(1, 4, 2, 8, 0.35, window=4))
    executor, reference = machine.load(tensorrt_plan(decoder)), load_executor(make_plan(decoder), threads=1)
    cache = cache_type(64, 4)
    prompt, nodes = draw_tokens(6, 1), draw_tokens(5, 2)
    begin = cache.step([("a", prompt), ("b", prompt[:3])], rows=[])
    # Root 0 with children 1 and 2; 2 has children 3 and 4. Beside it a sequence that only has a root and one child.
    step = cache.step([("b", nodes[:2]), ("a", nodes)])
    step = with_tree(step, [[0], [0, 1], [0], [0, 1], [0, 2], [0, 2, 3], [0, 2, 4]], [3, 3, 6, 6, 6, 6, 6])
    for each in (executor, reference):
        each.execute(begin)
    assert_close(executor.execute(step).logits, reference.execute(step).logits)


def test_accepted_tree_nodes_move_and_decoding_goes_on(
    plan: Plan, machine: Any, reference: Executor, cache_type: Any
) -> None:
    executor = machine.load(plan)
    cache = cache_type(64, 4)
    prompt, nodes = draw_tokens(6, 1), draw_tokens(3, 2)
    begin = cache.step([("a", prompt)], rows=[])
    step = with_tree(cache.step([("a", nodes)]), [[0], [0, 1], [0, 2]], [6, 6, 6])
    cache.length["a"] = 8
    after = cache.step([("a", np.array([11]))])
    for each in (executor, reference):
        each.execute(begin)
        each.execute(step)
        each.move(step.slots[2:3], step.slots[1:2])
    assert_close(executor.execute(after).logits, reference.execute(after).logits)


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
def test_kinds_of_attention(
    tiny_decoder: Any, tensorrt_plan: Any, make_plan: Any, machine: Any, cache_type: Any, spec
) -> None:
    decoder = tiny_decoder(spec)
    executor, reference = machine.load(tensorrt_plan(decoder)), load_executor(make_plan(decoder), threads=1)
    cache, tokens = cache_type(16, 4), draw_tokens(40)
    for start, stop in ((0, 20), (20, 21), (21, 30), (30, 31), (31, 32)):
        step = cache.step([("a", tokens[start:stop])])
        assert_close(executor.execute(step).logits, reference.execute(step).logits)


def test_an_int8_pool(decoder: Any, tensorrt_plan: Any, machine: Any, reference: Executor, cache_type: Any) -> None:
    executor = machine.load(tensorrt_plan(decoder, kv="int8"))
    cache, tokens = cache_type(16, 4), draw_tokens(40)
    for start, stop in ((0, 20), (20, 21), (21, 30), (30, 31), (31, 32)):
        step = cache.step([("a", tokens[start:stop])])
        assert_close(executor.execute(step).logits, reference.execute(step).logits, INT8)


def test_a_prompt_that_is_computed_again(plan: Plan, machine: Any, cache_type: Any) -> None:
    """As after a preemption: other blocks, other chunks, and the same answer up to the order of sums."""
    executor, tokens = machine.load(plan), draw_tokens(40)
    cache = cache_type(64, 4)
    executor.execute(cache.step([("a", tokens[:30])], rows=[]))
    for token in tokens[30:39]:
        first = executor.execute(cache.step([("a", np.array([token]))])).logits.copy()
    executor.execute(cache.step([("again", tokens[:25])], rows=[]))
    executor.execute(cache.step([("again", tokens[25:38])], rows=[]))
    again = executor.execute(cache.step([("again", tokens[38:39])])).logits
    assert_close(again, first)
