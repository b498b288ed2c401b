"""What a bench row is told: its share of the bound, and when there is none."""

import json
from dataclasses import replace

import pytest

from optimc.errors import ConfigError
from optimc.measure.bench_result import BenchResult, TokenRange
from optimc.measure.percentile import Distribution
from optimc.measure.roofline.bound import decode_floor
from optimc.measure.roofline.check import CheckRow, check
from optimc.measure.roofline.gpu_table import find_gpu
from optimc.measure.roofline.predict import predict_step_s, predict_tpot_s
from optimc.measure.roofline.roofline import Roofline, roofline
from optimc.measure.roofline.row_bound import RowBound, bound_of
from optimc.measure.roofline.work import PlanWork, StepShape
from optimc.measure.workload import Workload


@pytest.fixture
def result(machine):
    def make(tpot_ms, *, concurrency=1, ttft_ms=50.0, hit_rate=0.0, prompt=20, output=12, **changes):
        given = {
            "description": "tiny",
            "config": Workload(prompt_tokens=prompt, output_tokens=output, concurrency=concurrency),
            "machine": machine,
            "requests": 8,
            "failures": {},
            "ttft_ms": Distribution(ttft_ms, ttft_ms, None, 8),
            "tpot_ms": Distribution(tpot_ms, tpot_ms, None, 8 if tpot_ms is not None else 0),
            "itl_ms": Distribution(tpot_ms, tpot_ms, None, 8),
            "e2e_ms": Distribution(1.0, 1.0, None, 8),
            "queue_ms": Distribution(None, None, None, 0),
            "cold_ttft_ms": None,
            "output_tokens_per_s": None,
            "output_tokens_per_s_whole_run": None,
            "requests_per_s": 1.0,
            "prefill_tokens_per_s": None,
            "prefix_hit_rate": hit_rate,
            "prompt_tokens": TokenRange(prompt, prompt, prompt),
            "output_tokens": TokenRange(output, output, output),
            "token_source": "ids",
            "wall_s": 1.0,
            "warnings": (),
        }
        return BenchResult(**{**given, **changes})

    return make


def test_a_row_is_compared_with_the_floor_of_its_own_batch_and_lengths(tiny_plan, make_rates, result):
    plan, rates = tiny_plan(), make_rates()
    # A prompt of 20 and 12 tokens out: 11 steps, at 20 tokens before the step to 30; the floor grows evenly between.
    work = PlanWork.of(plan)
    floor_ms = 1e3 * (decode_floor(work, rates, 4, 20).seconds + decode_floor(work, rates, 4, 30).seconds) / 2
    bound = bound_of(plan, rates)(result(2 * floor_ms, concurrency=4))
    assert bound.tpot_ms == pytest.approx(floor_ms)
    assert bound.tpot_share == pytest.approx(0.5)
    assert str(bound) == "50% of bound, limited by memory"
    assert RowBound.from_json(json.loads(json.dumps(bound.to_json()))) == bound


def test_a_beaten_bound_is_said_and_not_clipped(tiny_plan, make_rates, result):
    bound = bound_of(tiny_plan(), make_rates())(result(1e-6))
    assert bound.tpot_share > 1
    assert bound.is_beaten
    assert "bound exceeded: rates are stale, measure again with --fresh" in str(bound)


def test_ttft_has_a_share_only_for_one_client_of_whose_prompts_nothing_was_cached(tiny_plan, make_rates, result):
    of = bound_of(tiny_plan(), make_rates())
    assert of(result(1.0)).ttft_share == pytest.approx(of(result(1.0)).ttft_ms / 50)
    assert of(result(1.0, hit_rate=0.1)).ttft_share is None  # cached tokens
    assert of(result(1.0, hit_rate=None)).ttft_share is None  # unknown
    assert of(result(1.0, concurrency=2)).ttft_share is None


def test_outputs_of_one_token_have_no_share(tiny_plan, make_rates, result):
    bound = bound_of(tiny_plan(), make_rates())(result(None, output=1))
    assert bound.tpot_ms is None
    assert bound.tpot_share is None


def test_with_speculation_a_floor_of_one_token_a_step_does_not_apply(tiny_plan, make_rates, result):
    bound = bound_of(tiny_plan(), make_rates())(result(1.0, speculation=object()))
    assert bound.tpot_share is None
    assert bound.predicted_tpot_ms is None
    assert "several tokens a step" in bound.note


def test_an_open_loop_is_bound_by_the_mean_in_flight(tiny_plan, make_rates, result):
    # 3,500 tokens a second of 1 ms each: 3.5 at once, 3 of which the floor counts.
    workload = Workload(prompt_tokens=20, output_tokens=12, arrival="constant", rate_per_s=300.0)
    plan, rates = tiny_plan(), make_rates()
    bound = bound_of(plan, rates)(result(1.0, config=workload, output_tokens_per_s_whole_run=3500.0))
    closed = bound_of(plan, rates)(result(1.0, concurrency=3))
    assert bound.tpot_ms == closed.tpot_ms
    assert "3 in flight" in bound.note


def test_a_prediction_adds_what_other_clients_prompts_take(tiny_plan, make_rates):
    # One more client: in one of every 11 steps its prompt of 20 rows is computed beside this one's token.
    work, rates = PlanWork.of(tiny_plan()), make_rates()
    plain_s = predict_step_s(work, rates, StepShape.decode(2, 26), 40)
    mixed_s = predict_step_s(work, rates, StepShape((26, 0), (1, 20), 2), 40)
    assert predict_tpot_s(work, rates, 2, 20, 12, 64, 40) == pytest.approx(plain_s + (mixed_s - plain_s) / 11)
    assert predict_tpot_s(work, rates, 1, 20, 12, 64, 40) == predict_step_s(work, rates, StepShape.decode(1, 26), 40)


def test_the_table_has_a_cell_for_each_batch_and_context_the_plan_takes(tiny_plan, make_rates):
    table = roofline(tiny_plan(), make_rates(), batches=(1, 4, 99), contexts=(20, 5000))
    assert [(cell.batch, cell.context) for cell in table.cells] == [
        (1, 20),
        (4, 20),
        (8, 20),  # the plan's most sequences
        (1, 255),  # its longest but for the token to come
        (4, 255),
        (8, 255),
    ]
    assert table.kv_bytes_per_token == 128
    assert table.kv_capacity_tokens == (1 << 20) // 128
    assert all(cell.predicted_tpot_ms >= cell.bound.tpot_ms for cell in table.cells)
    assert Roofline.from_json(json.loads(json.dumps(table.to_json()))) == table


def test_on_a_gpu_there_are_floors_and_no_predictions_and_the_source_is_shown(tiny_plan):
    table = roofline(tiny_plan(), find_gpu("L4"), batches=(1,), contexts=(20,))
    # 18,976 bytes of weights and a row, 20 * 128 of cache at 300 GB/s; nobody beats a datasheet, so no 5%.
    assert table.cells[0].bound.tpot_ms == pytest.approx((18_976 + 2_560) / 300e9 * 1e3)
    assert table.cells[0].predicted_tpot_ms is None
    assert "datasheet, not measured (NVIDIA L4" in table.notes[0]


def test_all_faults_of_the_options_are_named_at_once(tiny_plan, make_rates):
    with pytest.raises(ConfigError, match=r"(?s)--batch: .*got 0.*--context: .*got -1"):
        roofline(tiny_plan(), make_rates(), batches=(0,), contexts=(-1,))


def test_the_check_fails_on_a_beaten_bound_and_on_a_prediction_a_quarter_off():
    row = CheckRow(1, measured_tpot_ms=10.0, bound_tpot_ms=5.0, predicted_tpot_ms=12.5, limiter="memory")
    assert row.ok
    assert row.error == pytest.approx(0.25)
    assert not replace(row, predicted_tpot_ms=12.6).ok
    assert not replace(row, predicted_tpot_ms=7.4).ok
    assert not replace(row, bound_tpot_ms=10.1).ok


def test_the_check_measures_every_batch(tiny_plan, make_rates, result):
    asked = []

    def bench(workload):
        asked.append((workload.concurrency, workload.prompt_tokens, workload.output_tokens))
        return result(1.0, config=workload)

    rows = check(bench, bound_of(tiny_plan(), make_rates()), (1, 4))
    assert asked == [(1, 128, 64), (4, 128, 64)]
    assert [row.batch for row in rows] == [1, 4]
