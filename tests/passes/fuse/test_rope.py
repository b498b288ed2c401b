import numpy as np
import pytest

from optimc_passes.fuse.rope import ROTATIONS, PackedRotary, PartialRotary

RNG = np.random.default_rng(0)
HEADS = RNG.standard_normal((1, 2, 5, 8)).astype(np.float32)
ANGLES = RNG.uniform(-3, 3, (1, 5, 4)).astype(np.float32)


SLICES = """first = Slice (x, zero, middle, three, one)
        second = Slice (x, middle, end, three, one)"""
SPLIT = "first, second = Split <axis = 3> (x, widths)"


def _rotary(
    middle: int = 4,
    second_half: str = "angles",
    cos: str = "Cos",
    unsqueeze: int = 1,
    parts: str = SLICES,
    left: str = "Mul (x, cos)",
    right: str = "Mul (rotated, sin)",
    y: str = "Add (left, right)",
) -> str:
    return f"""rotary (float[1,2,T,8] x, float[1,T,4] angles, float[1,T,4] other) => (float[1,2,T,8] y)
    <int64[1] heads = {{{unsqueeze}}}, int64[1] zero = {{0}}, int64[1] middle = {{{middle}}}, int64[1] end = {{99}},
     int64[1] three = {{3}}, int64[1] one = {{1}}, int64[2] widths = {{{middle}, {8 - middle}}},
     float factor = {{1.25}}> {{
        repeated = Concat <axis = -1> (angles, {second_half})
        cosine = {cos} (repeated)
        scaled = Mul (cosine, factor)
        sine = Sin (repeated)
        cos = Unsqueeze (scaled, heads)
        sin = Unsqueeze (sine, heads)
        {parts}
        negated = Neg (second)
        rotated = Concat <axis = -1> (negated, first)
        left = {left}
        right = {right}
        y = {y}
    }}"""


def test_rotary_fires_once_and_computes_the_same(apply_rule):
    applied = apply_rule(ROTATIONS, _rotary())
    assert applied.times == 1
    # The tables are half as wide, and the constant factor on one of them is kept.
    assert applied.operators == {"Cos": 1, "Sin": 1, "Mul": 1, "RotaryEmbedding": 1}
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
    applied = apply_rule(ROTATIONS, _rotary(**change))
    assert applied.times == 0
    assert applied.reason == reason


@pytest.mark.parametrize(
    "change",
    [
        {"parts": SPLIT},
        {"left": "Mul (cos, x)", "right": "Mul (sin, rotated)", "y": "Add (right, left)"},
        {"parts": SPLIT.replace("3", "-1"), "y": "Add (right, left)"},
    ],
    ids=["one Split", "operands the other way round", "both"],
)
def test_rotary_fires_on_the_forms_of_other_exporters(apply_rule, change):
    applied = apply_rule(ROTATIONS, _rotary(**change))
    assert applied.times == 1
    assert applied.node("RotaryEmbedding").attributes.get_int("interleaved", 0) == 0
    applied.assert_equal(x=HEADS, angles=ANGLES, other=ANGLES)


def test_rotary_declines_a_split_elsewhere(apply_rule):
    applied = apply_rule(ROTATIONS, _rotary(parts=SPLIT, middle=3))
    assert applied.times == 0
    assert applied.reason == "the split is not into two halves"


def _stored(interleaved: bool, damage: bool = False) -> str:
    """A rotation by tables made beforehand for 6 positions, of which 5 are looked up."""
    angles = np.outer(np.arange(6), 1 / 10 ** np.arange(4))
    full = np.repeat(angles, 2, axis=1) if interleaved else np.concatenate([angles, angles], axis=1)
    full[5, 7] += damage

    def listed(table: np.ndarray) -> str:
        return ", ".join(f"{number:.8f}" for number in table.reshape(-1))

    halves = """first = Slice (x, zero, four, three, one)
        second = Slice (x, four, eight, three, one)
        negated = Neg (second)
        rotated = Concat <axis = -1> (negated, first)"""
    neighbours = """even = Slice (x, zero, eight, three, two)
        odd = Slice (x, one, eight, three, two)
        negated = Neg (odd)
        first = Unsqueeze (negated, last)
        second = Unsqueeze (even, last)
        pairs = Concat <axis = -1> (first, second)
        rotated = Reshape (pairs, shape)"""
    return f"""stored (float[1,2,T,8] x, int64[1,T] positions) => (float[1,2,T,8] y)
    <int64[1] zero = {{0}}, int64[1] one = {{1}}, int64[1] two = {{2}}, int64[1] three = {{3}}, int64[1] four = {{4}},
     int64[1] eight = {{8}}, int64[1] last = {{-1}}, int64[4] shape = {{1, 2, -1, 8}},
     float[6,8] cosines = {{{listed(np.cos(full))}}}, float[6,8] sines = {{{listed(np.sin(full))}}}> {{
        cosine = Gather (cosines, positions)
        sine = Gather (sines, positions)
        cos = Unsqueeze (cosine, one)
        sin = Unsqueeze (sine, one)
        {neighbours if interleaved else halves}
        left = Mul (x, cos)
        right = Mul (rotated, sin)
        y = Add (left, right)
    }}"""


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_reads_tables_made_beforehand(apply_rule, interleaved):
    applied = apply_rule(ROTATIONS, _stored(interleaved))
    assert applied.times == 1
    assert applied.operators == {"Gather": 2, "RotaryEmbedding": 1}
    assert applied.node("RotaryEmbedding").attributes.get_int("interleaved", 0) == interleaved
    assert applied.node("RotaryEmbedding").inputs[1].producer().inputs[0].shape == [6, 4]
    applied.assert_equal(x=HEADS, positions=np.array([[0, 1, 2, 4, 5]]))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_declines_a_table_whose_halves_differ_anywhere(apply_rule, interleaved):
    applied = apply_rule(ROTATIONS, _stored(interleaved, damage=True))
    assert applied.times == 0
    assert applied.reason == "the two halves of the table differ"


def _neighbours(second: str = "angles", step: str = "two") -> str:
    """A rotation of neighbours by angles that are repeated one by one."""
    return f"""neighbours (float[1,2,T,8] x, float[1,T,4] angles, float[1,T,4] other) => (float[1,2,T,8] y)
    <int64[1] zero = {{0}}, int64[1] one = {{1}}, int64[1] two = {{2}}, int64[1] three = {{3}}, int64[1] end = {{99}},
     int64[1] last = {{-1}}, int64[4] shape = {{1, 2, -1, 8}}, int64[3] flat = {{1, -1, 8}}> {{
        once = Unsqueeze (angles, last)
        again = Unsqueeze ({second}, last)
        twice = Concat <axis = -1> (once, again)
        repeated = Reshape (twice, flat)
        cosine = Cos (repeated)
        sine = Sin (repeated)
        cos = Unsqueeze (cosine, one)
        sin = Unsqueeze (sine, one)
        even = Slice (x, zero, end, three, {step})
        odd = Slice (x, one, end, three, {step})
        negated = Neg (odd)
        first = Unsqueeze (negated, last)
        second = Unsqueeze (even, last)
        pairs = Concat <axis = -1> (first, second)
        rotated = Reshape (pairs, shape)
        left = Mul (x, cos)
        right = Mul (rotated, sin)
        y = Add (left, right)
    }}"""


def test_rotary_of_neighbours_fires_once_and_computes_the_same(apply_rule):
    applied = apply_rule(ROTATIONS, _neighbours())
    assert applied.times == 1
    assert applied.operators == {"Cos": 1, "Sin": 1, "RotaryEmbedding": 1}
    assert applied.node("RotaryEmbedding").attributes["interleaved"].value == 1
    applied.assert_equal(x=HEADS, angles=ANGLES, other=ANGLES)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"second": "other"}, "neighbouring angles differ"),
        ({"step": "one"}, "the slices do not take every other channel"),
    ],
)
def test_rotary_of_neighbours_declines_with_its_reason(apply_rule, change, reason):
    applied = apply_rule(ROTATIONS, _neighbours(**change))
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
    applied = apply_rule(PartialRotary, _partial())
    assert applied.times == 1
    assert applied.operators == {"RotaryEmbedding": 1}
    assert applied.node("RotaryEmbedding").attributes["rotary_embedding_dim"].value == 4
    applied.assert_equal(x=HEADS, cos=np.cos(ANGLES[..., :2]), sin=np.sin(ANGLES[..., :2]))


@pytest.mark.parametrize("change", [{"end": 6}, {"start": 2}])
def test_partial_rotary_declines_parts_that_are_not_all_of_the_head(apply_rule, change):
    applied = apply_rule(PartialRotary, _partial(**change))
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
    applied = apply_rule(PackedRotary, _packed(shape, partial))
    assert applied.times == 1
    assert applied.operators["Transpose"] == 0
    assert applied.node("RotaryEmbedding").attributes["num_heads"].value == 2
    tables = ANGLES[..., :angles]
    applied.assert_equal(x=HEADS.swapaxes(1, 2).copy(), cos=np.cos(tables), sin=np.sin(tables))


def test_packed_rotary_declines_heads_that_are_packed_otherwise(apply_rule):
    applied = apply_rule(PackedRotary, _packed("-1, 8").replace("T,16", "N,8"))
    assert applied.times == 0
    assert applied.reason == "the rotated heads are not packed again"
