"""What fails says so in the engine's own error, frees what it took, and leaves an executor that works or says it does
not."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as real

from optimc.errors import EngineError, OptimcError
from optimc.plan import Plan
from optimc_runtime.executor.tensorrt.engine import TensorRtContext

TOKENS = np.arange(20)


@pytest.fixture(scope="module")
def plan(tiny_decoder: Any, tensorrt_plan: Callable[..., Plan]) -> Plan:
    return tensorrt_plan(tiny_decoder())


def test_a_load_that_fails_anywhere_leaves_nothing_behind(plan: Plan, machine: Any) -> None:
    gpu = machine.gpu
    told = set()
    for call in itertools.count(1):
        gpu.num_calls, gpu.fail_call = 0, call
        try:
            executor = machine.load(plan)
        except OptimcError as error:
            told.add("CUDA_ERROR_OUT_OF_MEMORY" in str(error) and str(error).startswith(f"{plan.path}: "))
            assert gpu.num_alive == 0, f"{gpu.handles} after call {call} of {gpu.counts}"
            continue
        calls, gpu.fail_call = gpu.num_calls, None
        executor.close()
        if calls < call:
            break
    assert call > 40
    assert told == {True}


def test_a_step_that_fails_anywhere_is_an_engine_error_and_the_next_one_works(
    plan: Plan, machine: Any, cache_type: Any
) -> None:
    gpu = machine.gpu
    executor = machine.load(plan)
    expected = executor.execute(cache_type(64, 4).step([("a", TOKENS), ("b", TOKENS[:3])])).logits.copy()
    failed, told = 0, set()
    for call in itertools.count(1):
        executor.close()
        executor = machine.load(plan)
        gpu.num_calls, gpu.fail_call = 0, call
        step = cache_type(64, 4).step([("a", TOKENS), ("b", TOKENS[:3])])
        try:
            executor.execute(step)
        except EngineError as error:
            told.add(str(error)[:30])
            gpu.fail_call = None
            np.testing.assert_array_equal(executor.execute(step).logits, expected)
            failed += 1
        if gpu.num_calls < call:
            break
    gpu.fail_call = None
    assert failed > 15
    assert all(each.startswith("step of 23 tokens: CUDA's cu") for each in told)


def test_a_context_that_is_refused_ends_before_the_gpu_is_let_go(plan: Plan, machine: Any) -> None:
    """Whoever looks at the error holds its frames; TensorRT's objects must not be among what they refer to."""
    machine.trt.refuse_shapes = True
    with pytest.raises(EngineError, match="tensorrt_rtx refused shape .* is outside") as told:
        machine.load(plan)
    assert told.value.__traceback__ is not None
    assert machine.trt.num_contexts == 1
    assert not machine.trt.alive
    assert machine.gpu.num_alive == 0


def test_what_tensorrt_refuses_names_its_reason(plan: Plan, machine: Any, cache_type: Any) -> None:
    executor = machine.load(plan)
    step = cache_type(64, 4).step([("b", TOKENS[:3])])
    machine.trt.fail_runs = 1
    with pytest.raises(EngineError, match="step of 3 tokens: tensorrt_rtx refused execution: out of luck"):
        executor.execute(step)
    assert executor.execute(step).logits.shape == (3, 50)


def test_a_context_that_refused_to_run_ends_when_the_device_rests(
    plan: Plan, machine: Any, cache_type: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have enqueued a part."""
    executor = machine.load(plan)
    pending = []
    close = TensorRtContext.close

    def watched(context: TensorRtContext) -> None:
        pending.append(len(machine.gpu.queue))
        close(context)

    monkeypatch.setattr(TensorRtContext, "close", watched)
    machine.trt.fail_runs = 1
    with pytest.raises(EngineError, match="out of luck"):
        executor.execute(cache_type(64, 4).step([("b", TOKENS[:3])]))
    assert pending == [0]


def test_a_lost_gpu_is_told_until_the_end(plan: Plan, machine: Any, cache_type: Any) -> None:
    executor = machine.load(plan)
    step = cache_type(64, 4).step([("b", TOKENS[:3])])
    machine.gpu.lost = real.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(EngineError, match="step of 3 tokens: CUDA's cu.* failed with CUDA_ERROR_ILLEGAL_ADDRESS"):
        executor.execute(step)
    with pytest.raises(EngineError, match="step of 3 tokens: the GPU is lost to this process since .*; restart"):
        executor.execute(step)
    with pytest.raises(EngineError, match="the GPU is lost"):
        executor.move(step.slots[:1], step.slots[1:2])
    executor.close()  # tries to free everything, and does not complain again
    machine.gpu.lost = None
    machine.gpu.memory.clear()  # as the end of the process does
    machine.gpu.handles.clear()
    machine.gpu.retained = 0


def test_closing_twice_is_closing_once_and_a_closed_executor_is_not_used(
    plan: Plan, machine: Any, cache_type: Any
) -> None:
    executor = machine.load(plan)
    step = cache_type(64, 4).step([("b", TOKENS[:3])])
    logits = executor.execute(step).logits
    kept = logits.copy()
    executor.close()
    executor.close()
    np.testing.assert_array_equal(logits, kept)  # the host's memory is the caller's as long as it looks
    with pytest.raises(AssertionError, match="closed"):
        executor.execute(step)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tokens": np.array([1, 50, 2])}, "token 50 is not one of 50"),
        ({"positions": np.array([0, 1, 64])}, "position 64 is not one of 64"),
        ({"slots": np.array([0, 1, 1 << 40])}, "slot 1099511627776 is not one of"),
        ({"logits_rows": np.array([3])}, "logits row 3 is not one of 3"),
        ({"block_table": np.array([[9999]], np.int32)}, "block 9999 is not one of"),
        ({"context_len": np.array([9], np.int32)}, "a sequence of 12 tokens with blocks for 4"),
    ],
)
def test_arrays_that_reach_outside_never_reach_the_device(
    plan: Plan, machine: Any, cache_type: Any, change: dict[str, np.ndarray], says: str
) -> None:
    executor = machine.load(plan)
    step = cache_type(4, 4).step([("b", TOKENS[:3])])
    before = machine.gpu.counts.get("cuMemcpyHtoDAsync")
    with pytest.raises(EngineError, match=f"step of 3 tokens: {says}"):
        executor.execute(replace(step, **change))
    assert machine.gpu.counts.get("cuMemcpyHtoDAsync") == before


def test_more_than_the_engine_was_built_for_is_refused(plan: Plan, machine: Any, cache_type: Any) -> None:
    executor = machine.load(plan)
    with pytest.raises(EngineError, match="a sequence of 65 tokens in a step; the engine was built for 64"):
        executor.execute(replace(step := cache_type(64, 4).step([("a", np.zeros(65, int))]), positions=step.slots * 0))
    with pytest.raises(EngineError, match="move of 65 slots: more rows than the 64 there is room for"):
        executor.move(np.arange(65), np.arange(65))
    with pytest.raises(EngineError, match="slot -1 is not one of"):
        executor.move(np.array([-1]), np.array([1]))
    executor.move(np.zeros(0, np.int64), np.zeros(0, np.int64))


def test_a_graph_that_cannot_be_captured_is_told_with_the_way_out(plan: Plan, machine: Any, cache_type: Any) -> None:
    executor = machine.load(plan)
    machine.gpu.fail["cuGraphInstantiate"] = real.CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
    step = cache_type(64, 4).step([("b", TOKENS[:3])])
    with pytest.raises(EngineError, match=r"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED.*OPTIMC_CUDA_GRAPHS=0"):
        executor.execute(step)
    assert executor.execute(step).logits.shape == (3, 50)
