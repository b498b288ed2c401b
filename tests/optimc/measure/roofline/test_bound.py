"""Floors: by hand on a machine with round figures, and never above a prediction made of the same figures."""

import random
from dataclasses import replace

import pytest

from optimc.errors import UnknownNameError
from optimc.measure.roofline.bound import cell_floor, compute_bound_batch, decode_floor, step_floor
from optimc.measure.roofline.gpu_table import GPUS, find_gpu
from optimc.measure.roofline.predict import execute_s, kernel_s
from optimc.measure.roofline.rates import KernelRate, MachineRates, envelope
from optimc.measure.roofline.work import OpWork, PlanWork, StepShape


def _op(weight=0, int8=0, floats=0, kv=0):
    return OpWork("op", "int4", 1, {"w": weight}, kv_context_bytes=kv, int8_ops=int8, float_ops=floats)


def test_the_floor_is_the_larger_of_reading_and_computing(make_rates):
    # 1.05 * 10 GB/s and 1.05 * 100 G, 50 G operations a second
    memory = step_floor([_op(weight=6_300_000, kv=4_200_000, int8=105_000_000)], make_rates())
    assert memory.seconds == pytest.approx(1e-3)
    assert memory.limiter == "memory"
    compute = step_floor([_op(weight=10, int8=105_000_000, floats=52_500_000)], make_rates())
    assert compute.seconds == pytest.approx(2e-3)  # both kinds, one after the other
    assert compute.limiter == "compute"


def test_more_bytes_never_take_less(make_rates):
    rates = make_rates(bandwidth=((1 << 20, 40e9), (4 << 20, 20e9), (16 << 20, 10e9)))
    seconds = [step_floor([_op(weight=size)], rates).seconds for size in range(100_000, 40_000_000, 77_777)]
    assert seconds == sorted(seconds)


def test_a_working_set_gets_the_bandwidth_of_the_largest_measured_one_not_above_it(make_rates):
    rates = make_rates(bandwidth=((1 << 20, 40e9), (4 << 20, 20e9)))
    assert [rates.bandwidth_at(size) for size in (1, 1 << 20, (4 << 20) - 1, 4 << 20, 1 << 30)] == [
        40e9,
        40e9,
        40e9,
        20e9,
        20e9,
    ]


def test_the_envelope_gives_a_smaller_set_no_less():
    measured = [(4, 30.0), (1, 20.0), (16, 10.0), (4, 25.0), (64, 12.0)]
    assert envelope(measured) == ((1, 30.0), (4, 30.0), (16, 12.0), (64, 12.0))


def test_decoding_turns_compute_bound_at_the_batch_computed_by_hand(tiny_plan, make_rates):
    # Context 0, so no cache is read. Bytes: 18,880 of weights and 96 of a row of the table, 1,897.6 ns at 10 GB/s.
    # Operations a row: 16,128 in 8 bits are 161.28 ns at 100 G/s; 3,840 of down, 3,840 of the head and 4 * 32 of
    # attention to itself are 156.16 ns at 50 G/s; 317.44 ns together. 1,897.6 / 317.44 = 5.98: from 6 rows on.
    work = PlanWork.of(tiny_plan())
    assert decode_floor(work, make_rates(), 1, 0).compute_s * 1.05 == pytest.approx(317.44e-9)
    assert compute_bound_batch(work, make_rates(), 0, 8) == 6
    assert compute_bound_batch(work, make_rates(), 0, 5) is None
    # With 200 tokens before it each sequence adds 2,560 ns of reading and 512 ns of computing: memory for good.
    assert compute_bound_batch(work, make_rates(), 200, 8) is None


def test_ttft_is_bounded_for_one_prompt_alone(tiny_plan, make_rates):
    work = PlanWork.of(tiny_plan())
    assert cell_floor(work, make_rates(), 1, 100).ttft_ms is not None
    assert cell_floor(work, make_rates(), 2, 100).ttft_ms is None


def test_no_floor_is_above_a_prediction_from_the_same_figures(tiny_plan, make_rates):
    rates, work, rng = make_rates(), PlanWork.of(tiny_plan()), random.Random(0)
    for _ in range(200):
        sequences = rng.randint(1, 8)
        contexts = tuple(rng.randint(0, 2000) for _ in range(sequences))
        queries = tuple(rng.choice((1, 1, rng.randint(2, 200))) for _ in range(sequences))
        ops = _step(work, StepShape(contexts, queries, rng.randint(0, sequences)))
        assert step_floor(ops, rates).seconds <= execute_s(ops, rates, work)


def _step(work, shape):
    from optimc.measure.roofline.work import step_work

    return step_work(work, shape)


def test_between_rows_groups_and_working_sets_rates_are_interpolated(make_rates):
    def table(group, size, scale):
        return KernelRate("int4", group, size, ((1, scale), (4, 4 * scale), (16, 16 * scale)))

    rates = make_rates(
        kernels=(table(16, 1 << 20, 3.0), table(64, 1 << 20, 1.0), table(16, 1 << 24, 6.0), table(64, 1 << 24, 2.0))
    )
    assert kernel_s(rates, "int4", 64, 2, 0) == pytest.approx(2.0)  # a straight line on both logarithmic axes
    assert kernel_s(rates, "int4", 64, 32, 0) == pytest.approx(32.0)  # beyond the last: proportional
    assert kernel_s(rates, "int4", 64, 1, 1 << 22) == pytest.approx(1.5)  # half way from 2^20 to 2^24
    # 1/32 is a third of the way from 1/64 to 1/16.
    assert kernel_s(rates, "int4", 32, 1, 0) == pytest.approx(1 + 2 / 3)
    assert kernel_s(rates, "int4", 128, 1, 1 << 30) == pytest.approx(2.0)


def test_rates_are_the_same_after_a_round_trip(make_rates):
    rates = make_rates()
    assert MachineRates.from_json(rates.to_json()) == rates


def test_an_unknown_gpu_lists_the_known():
    with pytest.raises(UnknownNameError, match=r"A100.*B200.*H100.*H200.*L4.*L40S.*RTX 4090"):
        find_gpu("H900")


def test_a_gpu_does_twice_as_much_in_8_bits_as_in_16():
    # As all tensor cores of the table do; datasheets round by less than that.
    for gpu in GPUS:
        assert gpu.int8_ops_per_s == pytest.approx(2 * gpu.fp16_ops_per_s, rel=0.005), gpu.name
        assert gpu.fp8_ops_per_s in (None, gpu.int8_ops_per_s)


def test_a_gpu_is_found_whatever_its_case_and_shows_its_source():
    gpu = find_gpu("rtx4090")
    assert (gpu.name, gpu.bytes_per_s) == ("RTX 4090", 1008e9)
    assert all("NVIDIA" in each.source for each in GPUS)
    assert replace(gpu).bandwidth_at(1) == gpu.bandwidth_at(1 << 40)
