"""qk_norm and rotary_qkv: what stands between the product of query, key and value and the attention."""

import numpy as np
import pytest

from optimc_passes.fuse.qk_norm import QkNorm
from optimc_passes.fuse.rotary_qkv import RotaryQkv

RNG = np.random.default_rng(0)
# Two query heads, one key head, four channels each.
QKV = RNG.standard_normal((5, 16)).astype(np.float32)
ANGLES = RNG.uniform(-3, 3, (5, 2)).astype(np.float32)
COS, SIN = np.cos(ANGLES), np.sin(ANGLES)

SPLIT = "q, k, v = Split <axis = -1> (qkv, widths)"
SLICES = """q = Slice (qkv, zero, eight, one)
        k = Slice (qkv, eight, twelve, one, one)
        v = Slice (qkv, twelve, end, one, one)"""


def _rotate(role: str, heads: int, attributes: str = "") -> str:
    return f"""{role}_batch = Unsqueeze ({role}, zero)
        {role}_cos = Unsqueeze (cos, zero)
        {role}_sin = Unsqueeze (sin, zero)
        {role}_turned = RotaryEmbedding <num_heads = {heads}{attributes}> ({role}_batch, {role}_cos, {role}_sin)
        {role}_rotated = Squeeze ({role}_turned, zero)"""


def _norm(role: str, heads: int, epsilon: float = 0.01, scale: str = "scale") -> str:
    return f"""{role}_heads = Reshape ({role}_raw, {role}_split)
        {role}_normed = RMSNormalization <axis = -1, epsilon = {epsilon}> ({role}_heads, {scale})
        {role} = Reshape ({role}_normed, {role}_packed)"""


def _graph(
    parts: str = SPLIT,
    q: str = _rotate("q", 2),
    k: str = _rotate("k", 1),
    operands: str = "q_rotated, k_rotated, v",
    total: int = 16,
    outputs: str = "float[T,8] y",
) -> str:
    return f"""attention (int64[T] input_ids, float[T,{total}] qkv, float[T,2] cos, float[T,2] sin) => ({outputs})
    <int64[3] widths = {{8, 4, 4}}, int64[1] zero = {{0}}, int64[1] one = {{1}}, int64[1] four = {{4}},
     int64[1] eight = {{8}}, int64[1] twelve = {{12}}, int64[1] end = {{999}},
     int64[3] q_split = {{-1, 2, 4}}, int64[3] k_split = {{-1, 1, 4}},
     int64[2] q_packed = {{-1, 8}}, int64[2] k_packed = {{-1, 4}},
     float[4] scale = {{1, 2, 3, 4}}, float[4] other = {{4, 3, 2, 1}}, float[8] wide = {{1, 2, 3, 4, 5, 6, 7, 8}}> {{
        {parts}
        {q}
        {k}
        y = optimc.PagedAttention <layer = 0, num_heads = 2, num_kv_heads = 1, head_dim = 4, scale = 0.5, window = 0,
            softcap = 0.0> ({operands})
    }}"""


RAW_SPLIT = "q_raw, k_raw, v = Split <axis = -1> (qkv, widths)"
PER_HEAD = {
    "parts": RAW_SPLIT,
    "q": _norm("q", 2) + "\n" + _rotate("q", 2),
    "k": _norm("k", 1, scale="other") + "\n" + _rotate("k", 1),
}
PER_ROW = {
    "parts": RAW_SPLIT,
    "q": "q = RMSNormalization <axis = -1, epsilon = 0.01> (q_raw, wide)\n" + _rotate("q", 2),
    "k": "k = RMSNormalization <axis = 1, epsilon = 0.01> (k_raw, other)\n" + _rotate("k", 1),
}


def _inputs() -> dict[str, np.ndarray]:
    return {"input_ids": np.arange(5), "qkv": QKV, "cos": COS, "sin": SIN}


@pytest.mark.parametrize("parts", [SPLIT, SLICES], ids=["a Split", "three Slices"])
def test_rotation_fires_once_and_computes_the_same(apply_rule, parts):
    applied = apply_rule(RotaryQkv.rules, _graph(parts))
    assert applied.times == 1
    assert applied.operators == {"RotaryQkv": 1, "PagedAttention": 1}
    attributes = {name: attribute.value for name, attribute in applied.node("RotaryQkv").attributes.items()}
    assert attributes == {
        "num_heads": 2, "num_kv_heads": 1, "head_dim": 4, "rotary_dim": 4, "interleaved": 0, "epsilon": 0.0
    }  # fmt: skip
    applied.assert_equal(**_inputs())


def test_some_channels_and_neighbours_may_be_rotated(apply_rule):
    some = ", rotary_embedding_dim = 2, interleaved = 1"
    text = _graph(q=_rotate("q", 2, some), k=_rotate("k", 1, some)).replace("float[T,2]", "float[T,1]")
    applied = apply_rule(RotaryQkv.rules, text)
    node = applied.node("RotaryQkv")
    assert (node.attributes["rotary_dim"].value, node.attributes["interleaved"].value) == (2, 1)
    applied.assert_equal(**{**_inputs(), "cos": COS[:, :1], "sin": SIN[:, :1]})


@pytest.mark.parametrize("norms", [PER_HEAD, PER_ROW], ids=["of each head", "of the whole row"])
def test_norms_are_taken_in_before_the_rotation(apply_rule, norms):
    applied = apply_rule(QkNorm.rules, _graph(**norms))
    assert applied.times == 1
    assert applied.operators["RMSNormalization"] == 0
    assert applied.operators["RotaryEmbedding"] == 2
    applied.assert_equal(**_inputs())
    both = apply_rule((*QkNorm.rules, *RotaryQkv.rules), _graph(**norms))
    assert both.operators == {"RotaryQkv": 1, "PagedAttention": 1}
    assert both.node("RotaryQkv").attributes["epsilon"].value == pytest.approx(0.01)
    both.assert_equal(**_inputs())


def test_norms_without_a_rotation_are_taken_in_too(apply_rule):
    text = _graph(RAW_SPLIT, _norm("q", 2), _norm("k", 1), operands="q, k, v")
    applied = apply_rule((*QkNorm.rules, *RotaryQkv.rules), text)
    assert applied.operators == {"RotaryQkv": 1, "PagedAttention": 1}
    assert applied.node("RotaryQkv").attributes["rotary_dim"].value == 0
    applied.assert_equal(**_inputs())


def test_a_layer_without_rotation_has_nothing_to_do(apply_rule):
    text = _graph(q="", k="", operands="q, k, v")
    rotated, normed = apply_rule(RotaryQkv.rules, text), apply_rule(QkNorm.rules, text)
    assert (rotated.times, rotated.report.already, rotated.reason) == (0, 1, "")
    assert (normed.times, normed.report.already, normed.reason) == (0, 0, "")


def test_rotation_leaves_norms_to_the_other_rule(apply_rule):
    applied = apply_rule(RotaryQkv.rules, _graph(**PER_HEAD))
    assert applied.times == 0
    assert applied.reason == "query and key are normed first; qk_norm takes that in"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"k": _rotate("k", 1).replace("(cos", "(sin")}, "query and key are not rotated alike"),
        ({"k": "k_rotated = Identity (k)"}, "Identity gives it alone, it is no part of a product"),
        ({"operands": "q_rotated, v, k_rotated"}, "the key is columns 12 to 16, not 8 to 12"),
        ({"outputs": "float[T,8] y, float[1,T,8] q_turned"}, "a value on the way has another reader"),
        ({"parts": SLICES, "total": 20}, "the value is columns 12 to 20, not 12 to 16"),
        ({"q": _rotate("q", 4)}, "it rotates 4 heads, the attention has 2"),
    ],
)  # fmt: skip
def test_rotation_declines_with_its_reason(apply_rule, change, reason):
    applied = apply_rule(RotaryQkv.rules, _graph(**change))
    assert applied.times == 0
    assert applied.reason == reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"k": _norm("k", 1, epsilon=0.1) + "\n" + _rotate("k", 1)}, "query and key are not normed alike"),
        ({"k": "k = Identity (k_raw)\n" + _rotate("k", 1)}, "Identity gives it alone, it is no part of a product"),
        ({"k": "computed = Neg (other)\n" + _norm("k", 1, scale="computed") + "\n" + _rotate("k", 1)},
         "the scale of the norm is computed"),
        ({"q": _norm("q", 2).replace("axis = -1", "axis = 1") + "\n" + _rotate("q", 2)},
         "the norm is not over the last axis only"),
    ],
)  # fmt: skip
def test_norms_decline_with_their_reason(apply_rule, change, reason):
    applied = apply_rule(QkNorm.rules, _graph(**{**PER_HEAD, **change}))
    assert applied.times == 0
    assert applied.reason == reason


def test_a_second_time_there_is_nothing(apply_rule):
    text = """fused (int64[T] input_ids, float[T,16] qkv, float[T,2] cos, float[T,2] sin) => (float[T,8] y) {
        q, k, v = optimc.RotaryQkv <num_heads = 2, num_kv_heads = 1, head_dim = 4, rotary_dim = 4, interleaved = 0,
            epsilon = 0.0> (qkv, cos, sin)
        y = optimc.PagedAttention <layer = 0, num_heads = 2, num_kv_heads = 1, head_dim = 4, scale = 0.5, window = 0,
            softcap = 0.0> (q, k, v)
    }"""
    for rules in (QkNorm.rules, RotaryQkv.rules):
        applied = apply_rule(rules, text)
        assert (applied.times, applied.report.already, applied.reason) == (0, 1, "")
