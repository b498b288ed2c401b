"""The pool: what it takes, what a step writes to it, and what is moved in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from optimc.errors import PlanTargetError
from optimc.plan import Plan
from optimc_passes.dialect import PagedAttention
from optimc_runtime.executor.tensorrt.pool import RESERVED_BYTES

NULL = 10 * 4


@pytest.fixture(scope="module")
def decoder(tiny_decoder: Any) -> Any:
    return tiny_decoder(PagedAttention(0, 4, 2, 8, 0.35), PagedAttention(1, 4, 2, 8, 0.35, window=6))


def pools_of(executor: Any, machine: Any, num_rows: int) -> dict[str, np.ndarray]:
    """The pool's tensors in device memory, by their port."""
    executor._device.synchronize()
    memory = executor._parts.runner._memory
    found = {}
    for name, (address, shape) in memory.inputs.items():
        assert shape[0] == num_rows
        has_codes = f"{name.removesuffix('_0').removesuffix('_1')}_scales_0" in memory.inputs
        dtype = np.dtype(np.int8 if has_codes else np.float16)
        found[name] = machine.gpu.array(address, int(np.prod(shape)) * dtype.itemsize).view(dtype).reshape(shape)
    return found


@pytest.fixture(params=["float16", "int8"])
def kv(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def executor(decoder: Any, tensorrt_plan: Callable[..., Plan], machine: Any, kv: str) -> Any:
    per_block = {"float16": 2 * 2 * 16 * 2 * 4, "int8": 2 * 2 * (16 + 2 * 2) * 4}[kv]
    return machine.load(tensorrt_plan(decoder, kv=kv), kv_memory_bytes=10 * per_block + 5)


def test_its_size_is_what_memory_holds(executor: Any, machine: Any, kv: str) -> None:
    """Two layers, keys and values, 4 slots, 2 heads of 8 numbers; int8 has a float16 scale per token and head."""
    wanted = {"float16": 512, "int8": 320}[kv]
    assert (executor.pool.num_blocks, executor.pool.block_size, executor.pool.bytes_per_block) == (10, 4, wanted)
    pools = pools_of(executor, machine, NULL + 1)
    assert len(pools) == {"float16": 4, "int8": 8}[kv]
    assert not any(pool.any() for pool in pools.values()), "rows that were never written are finite"


def test_a_step_writes_its_own_slots_only(executor: Any, machine: Any, cache_type: Any) -> None:
    pools = pools_of(executor, machine, NULL + 1)
    for pool in pools.values():
        pool[:-1] = np.float16(77) if pool.dtype == np.float16 else 77
    # Prefill and decode calls, and padding of sequences, queries and tokens.
    step = cache_type(10, 4).step([("a", np.arange(20)), ("b", np.arange(3)), ("c", np.arange(1)), ("d", np.arange(1))])
    executor.execute(step)
    executor.execute(step)  # as a graph
    for name, pool in pools_of(executor, machine, NULL + 1).items():
        written = (pool[:-1] != 77).any(axis=1)
        np.testing.assert_array_equal(np.flatnonzero(written), np.sort(step.slots), err_msg=name)
        assert not pool[-1].any(), "the null row stays zero"


def test_rows_move_as_if_all_were_read_before_any_is_written(executor: Any, machine: Any, cache_type: Any) -> None:
    executor.execute(cache_type(10, 4).step([("a", np.arange(30) % 50)], rows=[]))
    before = {name: pool.copy() for name, pool in pools_of(executor, machine, NULL + 1).items()}
    src, dst = np.array([3, 4, 5, 9]), np.array([4, 5, 3, 20])
    executor.move(src, dst)
    for name, pool in pools_of(executor, machine, NULL + 1).items():
        wanted = before[name]
        wanted[dst] = wanted[src]
        np.testing.assert_array_equal(pool, wanted, err_msg=name)


def test_memory_for_less_than_a_block_is_refused(decoder: Any, tensorrt_plan: Any, machine: Any) -> None:
    with pytest.raises(PlanTargetError, match="500 bytes holds no block; one block of 4 tokens takes 512 bytes, raise"):
        machine.load(tensorrt_plan(decoder), kv_memory_bytes=500)
    assert not machine.gpu.counts, "before CUDA is asked anything"


def test_more_than_the_device_has_free_is_refused_with_the_numbers(
    decoder: Any, tensorrt_plan: Any, machine: Any
) -> None:
    machine.gpu.total_bytes = RESERVED_BYTES + (1 << 20)
    with pytest.raises(
        PlanTargetError, match=r"has ([\d,]+) of its 269,484,032 bytes free .* lower kv_memory to ([\d,]+)"
    ) as told:
        machine.load(tensorrt_plan(decoder))
    most = int(str(told.value).rsplit(" ", 1)[1].replace(",", ""))
    assert 0 < most < 1 << 20
    executor = machine.load(tensorrt_plan(decoder), kv_memory_bytes=most - 4096)
    assert executor.pool.num_blocks > 100


def test_engines_that_compute_in_more_than_there_is_are_refused_with_the_numbers(
    decoder: Any, tensorrt_plan: Any, machine: Any
) -> None:
    machine.gpu.total_bytes = 4000
    with pytest.raises(PlanTargetError, match="compute in 4,096 bytes, .* has 4,000 of its 4,000 bytes free; rebuild"):
        machine.load(tensorrt_plan(decoder))


def test_more_rows_than_the_engine_was_built_for_are_refused(
    decoder: Any, tensorrt_plan: Any, machine: Any, monkeypatch
) -> None:
    from optimc_runtime.executor.tensorrt.engine import TensorRtEngine

    most = TensorRtEngine.most
    monkeypatch.setattr(
        TensorRtEngine, "most", lambda self, name, profile: (100, 16) if "pool" in name else most(self, name, profile)
    )
    with pytest.raises(PlanTargetError, match="8,193 rows, the engine was built for 100 at most; lower kv_memory"):
        machine.load(tensorrt_plan(decoder))


def test_a_bfloat16_pool_is_as_large_as_a_float16_one(decoder: Any, tensorrt_plan: Any) -> None:
    from optimc_runtime.executor.tensorrt.checked_program import checked_program
    from optimc_runtime.executor.tensorrt.pool import cache_tensors

    plan = tensorrt_plan(decoder, precision="bfloat16")
    tensors = cache_tensors(plan.manifest.kv, checked_program(plan).attention)
    assert [(tensor.dtype, tensor.row_bytes) for tensor in tensors] == [("bfloat16", 32)] * 4
    assert np.dtype(ml_dtypes.bfloat16).itemsize == 2
