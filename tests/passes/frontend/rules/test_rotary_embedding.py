import numpy as np
import pytest

from optimc_passes.frontend.rules import PackedRotary, PartialRotary, Rotary

ROTARY, PARTIAL, PACKED = Rotary.rule("rotary"), PartialRotary.rule("partial"), PackedRotary.rule("packed")
RNG = np.random.default_rng(0)
HEADS = RNG.standard_normal((1, 2, 5, 8)).astype(np.float32)
ANGLES = RNG.uniform(-3, 3, (1, 5, 4)).astype(np.float32)


def _rotary(middle: int = 4, second_half: str = "angles", cos: str = "Cos", unsqueeze: int = 1) -> str:
    return f"""rotary (float[1,2,T,8] x, float[1,T,4] angles, float[1,T,4] other) => (float[1,2,T,8] y)
    <int64[1] heads = {{{unsqueeze}}}, int64[1] zero = {{0}}, int64[1] middle = {{{middle}}}, int64[1] end = {{99}},
     int64[1] three = {{3}}, int64[1] one = {{1}}, float factor = {{1.25}}> {{
        repeated = Concat <axis = -1> (angles, {second_half})
        cosine = {cos} (repeated)
        scaled = Mul (cosine, factor)
        sine = Sin (repeated)
        cos = Unsqueeze (scaled, heads)
        sin = Unsqueeze (sine, heads)
        first = Slice (x, zero, middle, three, one)
        second = Slice (x, middle, end, three, one)
        negated = Neg (second)
        rotated = Concat <axis = -1> (negated, first)
        left = Mul (x, cos)
        right = Mul (rotated, sin)
        y = Add (left, right)
    }}"""


def test_rotary_fires_once_and_computes_the_same(apply_rule):
    applied = apply_rule(ROTARY, _rotary())
    assert applied.times == 1
    # The tables are half as wide, and the constant factor on one of them is kept.
    assert applied.operators == {"Cos": 1, "Sin": 1, "Constant": 1, "Mul": 1, "RotaryEmbedding": 1}
    applied.assert_equal(x=HEADS, angles=ANGLES, other=ANGLES)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"middle": 3}, "the slices are not the two halves"),
        ({"second_half": "other"}, "the two halves of the angles differ"),
        ({"cos": "Sin"}, "not a Cos table of 4 angles"),
        ({"cos": "Tan"}, "the table is not a cosine or sine"),
        ({"unsqueeze": 0}, "the table is not broadcast over heads"),
    ],
)
def test_rotary_declines_with_its_reason(apply_rule, change, reason):
    applied = apply_rule(ROTARY, _rotary(**change))
    assert applied.times == 0
    assert applied.reason == reason


def _partial(start: int = 0, end: int = 99) -> str:
    return f"""partial (float[1,2,T,8] x, float[1,T,2] cos, float[1,T,2] sin) => (float[1,2,T,N] y)
    <int64[1] zero = {{{start}}}, int64[1] middle = {{4}}, int64[1] end = {{{end}}}, int64[1] three = {{3}}> {{
        head = Slice (x, zero, middle, three)
        rest = Slice (x, middle, end, three)
        rotated = RotaryEmbedding (head, cos, sin)
        y = Concat <axis = -1> (rotated, rest)
    }}"""


def test_partial_rotary_fires_once_and_computes_the_same(apply_rule):
    applied = apply_rule(PARTIAL, _partial())
    assert applied.times == 1
    assert applied.operators == {"RotaryEmbedding": 1}
    assert applied.node("RotaryEmbedding").attributes["rotary_embedding_dim"].value == 4
    applied.assert_equal(x=HEADS, cos=np.cos(ANGLES[..., :2]), sin=np.sin(ANGLES[..., :2]))


@pytest.mark.parametrize("change", [{"end": 6}, {"start": 2}])
def test_partial_rotary_declines_parts_that_are_not_all_of_the_head(apply_rule, change):
    applied = apply_rule(PARTIAL, _partial(**change))
    assert applied.times == 0
    assert applied.reason == "the slices do not cover the last axis"


def _packed(shape: str = "-1, 16", partial: str = "") -> str:
    rank = shape.count(",") + 1
    out = "T,16" if rank == 2 else "1,T,16"
    return f"""packed (float[1,T,2,8] x, float[1,T,N] cos, float[1,T,N] sin) => (float[{out}] y)
    <int64[{rank}] shape = {{{shape}}}> {{
        moved = Transpose <perm = [0, 2, 1, 3]> (x)
        rotated = RotaryEmbedding {partial} (moved, cos, sin)
        back = Transpose <perm = [0, 2, 1, 3]> (rotated)
        y = Reshape (back, shape)
    }}"""


@pytest.mark.parametrize(("partial", "angles"), [("", 4), ("<rotary_embedding_dim = 4>", 2)])
@pytest.mark.parametrize("shape", ["-1, 16", "1, -1, 16"])
def test_packed_rotary_fires_once_and_computes_the_same(apply_rule, shape, partial, angles):
    applied = apply_rule(PACKED, _packed(shape, partial))
    assert applied.times == 1
    assert applied.operators["Transpose"] == 0
    assert applied.node("RotaryEmbedding").attributes["num_heads"].value == 2
    tables = ANGLES[..., :angles]
    applied.assert_equal(x=HEADS.swapaxes(1, 2).copy(), cos=np.cos(tables), sin=np.sin(tables))


def test_packed_rotary_declines_heads_that_are_packed_otherwise(apply_rule):
    applied = apply_rule(PACKED, _packed("-1, 8").replace("T,16", "N,8"))
    assert applied.times == 0
    assert applied.reason == "the rotated heads are not packed again"
