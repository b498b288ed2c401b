"""What the host does while the device works. The fake device runs nothing before somebody waits, so what has run when a
method returns is what was waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from optimc.plan import Plan


@pytest.fixture(scope="module")
def plan(tiny_decoder: Any, tensorrt_plan: Callable[..., Plan]) -> Plan:
    return tensorrt_plan(tiny_decoder())


def test_the_last_calls_rows_are_committed_while_the_host_samples(plan: Plan, machine: Any, cache_type: Any) -> None:
    executor = machine.load(plan)
    cache = cache_type(64, 4)
    first = executor.execute(cache.step([("a", np.arange(20))])).logits
    assert len(machine.gpu.queue) == 1, "commit_rows, and nothing else"
    assert np.isfinite(first).all()
    executor.execute(cache.step([("a", np.arange(1))]))
    assert len(machine.gpu.queue) == 1


def test_calls_are_laid_out_while_those_before_run(plan: Plan, machine: Any, cache_type: Any) -> None:
    executor = machine.load(plan)
    runner = executor._parts.runner
    queued: list[int] = []
    enqueue = runner.enqueue

    def watched(*arguments: Any) -> None:
        queued.append(len(machine.gpu.queue))
        enqueue(*arguments)

    runner.enqueue = watched
    work = [("a", np.arange(20)), ("b", np.arange(18)), ("c", np.arange(2)), ("d", np.arange(1))]
    executor.execute(cache_type(64, 4).step(work))
    # Copy of inputs and its event, engine, copies of logits, event, commit: nothing of a call has run when the next is
    # laid out. With two buffers, the third call waits for the first one's copy alone.
    assert queued[0] == 0
    assert queued[1] > 3
    assert queued[2] > queued[1]


def test_inputs_are_not_overwritten_before_they_were_copied(plan: Plan, machine: Any, cache_type: Any) -> None:
    """Five calls through two buffers; the numbers are those of five steps."""
    executor = machine.load(plan)
    lengths = {"a": 17, "b": 18, "c": 19, "d": 1}
    tokens = {name: (np.arange(length) * 7) % 50 for name, length in lengths.items()}
    together = executor.execute(cache_type(64, 4).step(list(tokens.items()))).logits.copy()
    apart = []
    for name, each in tokens.items():
        apart.append(executor.execute(cache_type(64, 4).step([(name, each)])).logits.copy())
    np.testing.assert_array_equal(together, np.concatenate(apart))


def test_the_order_of_sequences_in_a_step_changes_no_answer(plan: Plan, machine: Any, cache_type: Any) -> None:
    executor = machine.load(plan)
    work = [("a", np.arange(17)), ("b", np.arange(3) + 5), ("c", np.arange(20) + 9), ("d", np.arange(1))]
    logits = executor.execute(cache_type(64, 4).step(work)).logits.copy()
    backwards = executor.execute(cache_type(64, 4, seed=1).step(work[::-1])).logits
    parts = np.split(backwards, np.cumsum([len(tokens) for _, tokens in work[::-1]])[:-1])
    np.testing.assert_allclose(np.concatenate(parts[::-1]), logits, atol=2e-3 * np.abs(logits).max())


def test_logits_that_were_kept_stay_readable_when_more_rows_are_asked_for(
    plan: Plan, machine: Any, cache_type: Any
) -> None:
    executor = machine.load(plan)
    logits = executor.execute(cache_type(64, 4).step([("a", np.arange(3))])).logits
    kept = logits.copy()
    grown = executor.execute(cache_type(64, 4).step([("a", np.arange(40))])).logits
    assert grown.shape == (40, 50)
    np.testing.assert_array_equal(logits, kept)
