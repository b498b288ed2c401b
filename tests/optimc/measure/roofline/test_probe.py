"""Synthetic programs run on the real executor; what they take is turned into rates."""

import numpy as np
import pytest

from optimc.measure.roofline.probe import GROUPS, measure_rates
from optimc.measure.roofline.rates import MachineRates
from optimc.measure.roofline.synthetic import (
    RandomFile,
    attention_draft,
    attention_layout,
    chain_draft,
    light_draft,
    linear_draft,
    weight_bytes,
)
from optimc.measure.roofline.timed_steps import executor_of, fill_pool, step_of, time_steps
from optimc_runtime import _native
from optimc_runtime.executor.cpu_assembly import kv_layers


@pytest.fixture(scope="module")
def file():
    with RandomFile.of(4 << 20) as file:
        yield file


@pytest.mark.parametrize("kind", GROUPS)
def test_products_of_every_kind_run_and_stay_finite(file, kind):
    for group in GROUPS[kind]:
        draft, nbytes = linear_draft(kind, group, 64, 2)
        assert nbytes == 2 * weight_bytes(kind, group, 64)
        with executor_of(file.plan(draft), 1, 1 << 6, 2048) as executor:
            logits = executor.execute(step_of([0], [3])).logits
        assert np.isfinite(logits).all()


def test_a_weight_has_the_bytes_counted_by_hand():
    # 2 panels; 4 groups of 16: 64 bytes of scales, 32 of zero points, 32 rows * 16 codes of half a byte
    assert weight_bytes("int4", 16, 64) == 2 * 4 * (64 + 32 + 256)
    assert weight_bytes("int8", 64, 64) == 2 * (64 + 32 * 64)
    assert weight_bytes("bfloat16", 0, 64) == 2 * 32 * 64 * 2


@pytest.mark.parametrize("draft", [light_draft("norm", 64, 32, 3), light_draft("round", 64, 16, 3)])
def test_light_operations_run(file, draft):
    with executor_of(file.plan(draft), 1, 1 << 6, 2048) as executor:
        executor.execute(step_of([0], [8]))


def test_a_chain_reads_what_its_products_left_or_what_stays(file):
    for linked in (True, False):
        with executor_of(file.plan(chain_draft(32, 64, 2, linked=linked)), 1, 1 << 6, 2048) as executor:
            executor.execute(step_of([0], [8]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
def test_attention_runs_on_blocks_of_its_own_that_were_written(file, dtype):
    layout = attention_layout(dtype, 1, 16, 2)
    block = _native.kv_block_bytes(layers=kv_layers(layout), block_size=16)
    step = step_of([40, 40], [1, 1])
    assert step.block_table.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert step.slots.tolist() == [40, 3 * 16 + 40]
    with executor_of(file.plan(attention_draft(2, 1, 16, 2), layout), 1, 6, block) as executor:
        fill_pool(executor, 6)
        executor.execute(step)


def test_steps_take_turns_until_enough_time_is_spent():
    now, order = [0.0], []

    class Executor:
        def execute(self, step):
            order.append(step)
            now[0] += step

    best = time_steps(Executor(), [0.25, 1.0], least_s=1.0, clock=lambda: now[0])
    assert order == [0.25, 1.0, 0.25, 1.0, 0.25, 1.0, 0.25, 1.0, 0.25]  # once each, then 4 times and 3, the fewest
    assert [each.median for each in best] == [0.25, 1.0]


MIB = 1 << 20
SMALL = {
    "probe.READ_SETS": (MIB, 4 * MIB), "probe.SETS": {MIB: (1, 4), 4 * MIB: (1, 4)}, "probe.LIGHT_OPS": 20,
    "probe.CHAIN": 2, "probe.CONTEXTS": ((4, 16), (1, 64)), "probe.PEAK_S": 0.01, "probe.STEP_S": 0.0,
    "probe.TURNS": 1, "probe.TURN_S": 0.0, "engine_overhead.WORK_BYTES": MIB, "engine_overhead.OUTPUT_TOKENS": 4,
    "engine_overhead.CLIENTS": 2, "engine_overhead.STEPS": 4, "engine_overhead.ALONE_S": 0.0,
}  # fmt: skip
"""Enough to run all there is; the figures mean nothing."""


@pytest.mark.parametrize("sizes", [SMALL, pytest.param({}, marks=pytest.mark.slow)], ids=["small", "as it is done"])
def test_a_machine_is_measured_whole(sizes, monkeypatch):
    for name, value in sizes.items():
        monkeypatch.setattr(f"optimc.measure.roofline.{name}", value)
    rates = measure_rates(1)
    assert MachineRates.from_json(rates.to_json()) == rates
    assert {each.kind for each in rates.kernels} == set(GROUPS)
    assert all(seconds > 0 for each in rates.kernels for _, seconds in each.points)
    bandwidths = [rate for _, rate in rates.bandwidth]
    assert bandwidths == sorted(bandwidths, reverse=True)
