"""Bytes and operations of a program of one layer, counted by hand (see conftest for the weights' bytes)."""

import numpy as np
import pytest

from optimc.errors import PlanTargetError
from optimc.measure.roofline.work import PlanWork, StepShape, distinct_bytes, step_work
from optimc_runtime import _native

TOKEN_BYTES = 2 * 16 * 4  # key and value of one head of 16 in float32


@pytest.fixture
def count(tiny_plan):
    def make(shape, **options):
        work = PlanWork.of(tiny_plan(**options))
        return {op.name: op for op in step_work(work, shape)}

    return make


def test_a_step_reads_every_weight_as_it_is_stored(count):
    ops = count(StepShape.decode(1, 0))
    assert ops["qkv"].weight_bytes == 2 * (128 + 1024 + 128 + 512) == 3584  # wide scales, a ragged group
    assert ops["gate"].weight_bytes == 4 * (96 + 512 + 96 + 256) == 3840  # both halves, the first padded, zero points
    assert ops["down"].weight_bytes == 64 * 40 * 2 == 5120  # rows padded to panels
    assert ops["head"].weight_bytes == 64 * 48 * 2 == 6144
    assert ops["norm"].weight_bytes == 48 * 4


def test_the_sums_are_the_tensors_that_the_operations_name_and_no_others(tiny_plan):
    plan = tiny_plan()
    named = ["qkv", "gate", "down", "head", "norm"]  # not "text"
    assert PlanWork.of(plan).weight_bytes == sum(plan.spec(name).nbytes for name in named)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("qkv", {"outputs": 64, "group": 32, "bits": 8, "zeros": False, "wide_scales": True, "zero_point": 128}),
        ("gate", {"outputs": 104, "group": 32, "bits": 4, "zeros": True, "wide_scales": False, "zero_point": 0}),
    ],
)
def test_the_bytes_by_hand_are_those_the_executor_takes(count, name, given):
    nbytes = count(StepShape.decode(1, 0))[name].weight_bytes
    builder = _native.ProgramBuilder(
        layers=[(1, 16, "float32", "token")], block_size=16, num_blocks=1, capacity=1, arena_bytes=64
    )
    builder.int_weight(np.zeros(nbytes, np.uint8), features=48, **given)
    with pytest.raises(ValueError, match="bytes"):
        builder.int_weight(np.zeros(nbytes - 1, np.uint8), features=48, **given)


def test_rows_share_one_reading_of_the_weights_and_each_has_its_operations(count):
    one, four = count(StepShape.decode(1, 10)), count(StepShape.decode(4, 10))
    for name in ("qkv", "gate", "down", "head"):
        assert four[name].weight_bytes == one[name].weight_bytes
        assert four[name].int8_ops + four[name].float_ops == 4 * (one[name].int8_ops + one[name].float_ops)
    assert one["qkv"].int8_ops == 2 * 64 * 48
    assert one["gate"].int8_ops == 2 * 104 * 48  # outputs hold both halves
    assert one["down"].float_ops == 2 * 48 * 40
    assert one["head"].float_ops == 2 * 40 * 48


def test_a_second_term_is_a_second_product_with_the_same_weights(count):
    once, twice = count(StepShape.decode(1, 0)), count(StepShape.decode(1, 0), terms=2)
    assert twice["gate"].int8_ops == 2 * once["gate"].int8_ops
    assert twice["gate"].weight_bytes == once["gate"].weight_bytes


def test_a_head_tied_to_the_embedding_is_read_once(tiny_plan):
    ops = step_work(PlanWork.of(tiny_plan()), StepShape.decode(3, 0))
    by_name = {op.name: op for op in ops}
    assert by_name["embed"].table_bytes == 3 * 48 * 2  # a row per token, of 48 in bfloat16
    assert by_name["embed"].weight_bytes == 0
    assert distinct_bytes([*ops, *ops]) == distinct_bytes(ops) == 3584 + 3840 + 5120 + 6144 + 192


def test_without_rows_that_need_logits_the_head_is_not_read(count):
    ops = count(StepShape((0,), (5,), 0))
    assert ops["head"].weight_bytes == ops["head"].float_ops == 0
    assert ops["down"].rows == 5


def test_attention_reads_what_stands_before_and_what_the_step_brings(count):
    op = count(StepShape(contexts=(10, 3), queries=(1, 1), logits_rows=2))["attention"]
    assert op.kv_read_bytes == (11 + 4) * TOKEN_BYTES
    assert op.kv_context_bytes == (10 + 3) * TOKEN_BYTES
    assert op.kv_write_bytes == 2 * TOKEN_BYTES
    assert op.float_ops == 4 * 2 * 16 * (11 + 4)  # 2 heads of 16


def test_a_prompt_sees_a_triangle(count):
    op = count(StepShape.prefill(4, 64)[0])["attention"]
    assert op.float_ops == 4 * 32 * (1 + 2 + 3 + 4)
    assert op.together_elements == 32 * 10
    assert op.alone_elements == 0


def test_a_window_clips_what_is_read_and_seen(count):
    op = count(StepShape(contexts=(10,), queries=(1,), logits_rows=1), window=4)["attention"]
    assert op.kv_read_bytes == 4 * TOKEN_BYTES
    assert op.kv_context_bytes == 3 * TOKEN_BYTES
    prompt = count(StepShape.prefill(6, 64)[0], window=4)["attention"]
    assert prompt.float_ops == 4 * 32 * (1 + 2 + 3 + 4 + 4 + 4)


@pytest.mark.parametrize(
    ("dtype", "block"),
    [
        ("float32", 16 * 16 * 4 * 2),
        ("bfloat16", 16 * 16 * 2 * 2),
        ("int8", 16 * 16 * 2 + 2 * 16 * 4),  # a float32 scale per token for keys, and for values
        # values are padded to 32 dimensions; two scales and two minimums
        ("int4", 16 * 16 // 2 + 16 * 32 // 2 + 4 * 16 * 4),
    ],
)
def test_a_tokens_cache_is_its_share_of_the_executors_block(tiny_plan, dtype, block):
    plan = tiny_plan(kv_dtype=dtype)
    assert PlanWork.of(plan).kv_bytes == (block / 16,)
    assert _native.kv_block_bytes(layers=[(1, 16, dtype, "token")], block_size=16) == block


def test_up_to_four_rows_every_thread_rounds_for_itself(count):
    assert count(StepShape.decode(4, 0))["norm"].is_private
    assert not count(StepShape.decode(5, 0))["norm"].is_private
    assert not count(StepShape.decode(1, 0))["rows"].is_private


def test_prompts_are_computed_in_steps_and_only_the_last_needs_logits():
    steps = StepShape.prefill(150, 64)
    assert [(step.contexts, step.queries, step.logits_rows) for step in steps] == [
        ((0,), (64,), 0),
        ((64,), (64,), 0),
        ((128,), (22,), 1),
    ]


def test_another_target_declines_with_its_name(tiny_plan):
    with pytest.raises(PlanTargetError, match=r"tensorrt.*cpu and onnxruntime"):
        PlanWork.of(tiny_plan(backend="tensorrt"))
