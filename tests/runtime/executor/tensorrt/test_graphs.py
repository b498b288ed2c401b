"""CUDA graphs: one per shape of decode calls, captured when it was met once, and the same numbers as without."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from optimc.plan import Plan
from optimc_runtime.executor.tensorrt import contexts
from optimc_runtime.executor.tensorrt.cuda import CudaDevice, Pointer


@pytest.fixture(scope="module")
def plan(tiny_decoder: Any, tensorrt_plan: Callable[..., Plan]) -> Plan:
    return tensorrt_plan(tiny_decoder())


def draw_tokens(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50, count)


def decode_steps(cache: Any, sequences: int, count: int) -> list[Any]:
    """A step that reads prompts, then `count` that add a token to each sequence."""
    prompts = [(f"s{b}", draw_tokens(3 + b, b)) for b in range(sequences)]
    steps = [cache.step(prompts, rows=[])]
    for index in range(count):
        steps.append(cache.step([(name, draw_tokens(1, 100 * index + b)) for b, (name, _) in enumerate(prompts)]))
    return steps


def test_a_graph_is_captured_once_per_shape_and_then_launched(plan: Plan, machine: Any, cache_type: Any) -> None:
    executor, gpu = machine.load(plan), machine.gpu
    for step in decode_steps(cache_type(96, 4), 3, 12):
        executor.execute(step)
    # The prompts' shape ran once; the decodes' once by itself and eleven times as a graph.
    assert len(machine.trt.enqueued) == 2
    assert gpu.counts["cuStreamBeginCapture"] == gpu.counts["cuGraphInstantiate"] == executor.num_graphs == 2
    assert gpu.counts["cuGraphLaunch"] == 11
    assert machine.trt.num_contexts == 3, "one for chunks, one for each shape"


def test_graphs_answer_what_calls_without_answer_bit_for_bit(
    plan: Plan, machine: Any, cache_type: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = decode_steps(cache_type(96, 4), 5, 20)
    executor = machine.load(plan)
    with_graphs = [executor.execute(step).logits.copy() for step in steps]
    executor.close()
    monkeypatch.setenv("OPTIMC_CUDA_GRAPHS", "0")
    executor = machine.load(plan)
    launched = machine.gpu.counts["cuGraphLaunch"]
    for step, logits in zip(steps, with_graphs, strict=True):
        np.testing.assert_array_equal(executor.execute(step).logits, logits)
    assert executor.num_graphs == 0
    assert machine.gpu.counts["cuGraphLaunch"] == launched


def test_chunks_of_prompts_run_without_graphs_and_share_a_context(plan: Plan, machine: Any, cache_type: Any) -> None:
    executor = machine.load(plan)
    cache = cache_type(96, 4)
    for length in (17, 30, 17):
        executor.execute(cache.step([(length, draw_tokens(length))]))
    assert executor.num_graphs == 0
    assert machine.trt.num_contexts == 1
    assert [shapes["input_ids"] for shapes in machine.trt.enqueued] == [(17,), (30,), (17,)], "not rounded up"


def test_the_shape_that_rested_longest_makes_room(
    plan: Plan, machine: Any, cache_type: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contexts.RepeatedShapes.__init__, "__kwdefaults__", {"most": 2})
    executor = machine.load(plan)
    cache = cache_type(96, 4)

    def decode(sequences: int) -> None:
        executor.execute(cache.step([(b, draw_tokens(1)) for b in range(sequences)]))

    decode(1), decode(2), decode(1)
    assert (executor.num_graphs, len(machine.trt.enqueued)) == (2, 2)
    decode(4)  # two sequences have rested
    decode(1)
    assert (executor.num_graphs, len(machine.trt.enqueued)) == (2, 3)
    decode(2)
    assert (executor.num_graphs, len(machine.trt.enqueued)) == (2, 4)


def test_a_shape_that_makes_room_before_it_was_captured_is_forgotten(machine: Any) -> None:
    """It may come back before anything is captured; then it is captured once."""
    device = CudaDevice(machine.driver)

    class Context:
        is_capturable = True

        def set_shape(self, *_: Any) -> None: ...
        def set_address(self, *_: Any) -> None: ...
        def enqueue(self) -> None: ...
        def close(self) -> None: ...

    maker: Any = SimpleNamespace(make=lambda *, fixed_shapes: Context())
    shapes = contexts.RepeatedShapes(device, maker, graphs=True, most=1)
    for size in (1, 2, 1):
        shapes.run({"tokens": (Pointer(0), (size,))})
    shapes.capture_new()
    assert shapes.num_graphs == machine.gpu.counts["cuGraphInstantiate"] == 1
    shapes.close()
    device.close()
    assert machine.gpu.num_alive == 0


@pytest.mark.parametrize(("asked", "repeated"), [("", "NONE"), ("eager", "EAGER")])
def test_contexts_share_what_tensorrt_compiles_while_it_serves(
    plan: Plan, machine: Any, cache_type: Any, monkeypatch: pytest.MonkeyPatch, asked: str, repeated: str
) -> None:
    monkeypatch.setenv("OPTIMC_RTX_KERNELS", asked)
    executor = machine.load(plan)
    monkeypatch.setenv("OPTIMC_RTX_KERNELS", "")  # looked at while loading, not when a shape is met
    for step in decode_steps(cache_type(96, 4), 3, 2):
        executor.execute(step)
    chunks, decodes = machine.trt.configs
    assert machine.trt.num_contexts == 3
    assert chunks.cache is decodes.cache
    assert chunks.dynamic_shapes_kernel_specialization_strategy.name == "NONE"
    assert decodes.dynamic_shapes_kernel_specialization_strategy.name == repeated


def test_full_tensorrt_is_only_told_whose_memory_it_computes_in(
    plan: Plan, machine: Any, cache_type: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other flavor compiles nothing while it serves, and has no word on what can be captured."""
    from .fake_tensorrt import FakeContext, FakeEngine, FakeTensorRt

    monkeypatch.delattr(FakeTensorRt, "DynamicShapesKernelSpecializationStrategy")
    monkeypatch.delattr(FakeContext, "is_stream_capturable")
    asked = []

    def create(self: Any, strategy: Any) -> Any:
        asked.append(strategy.name)
        return FakeContext(self._trt, self._log, self)

    monkeypatch.setattr(FakeEngine, "create_execution_context", create)
    executor = machine.load(plan)
    for step in decode_steps(cache_type(96, 4), 3, 3):
        executor.execute(step)
    assert asked == ["USER_MANAGED"] * 3
    assert executor.num_graphs == 2


def test_the_number_of_shapes_of_a_long_run_is_small(plan: Plan, machine: Any, cache_type: Any) -> None:
    executor = machine.load(plan)
    cache = cache_type(128, 4)
    rng = np.random.default_rng(0)
    for _ in range(60):
        work = [(b, draw_tokens(int(rng.integers(1, 3)))) for b in range(8) if rng.random() < 0.8]
        if work and all(cache.length.get(name, 0) < 62 for name, _ in work):
            executor.execute(cache.step(work))
    assert executor.num_graphs == len(machine.trt.enqueued) <= 14
