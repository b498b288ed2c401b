"""The rules that only move data: rows, reshapes, transposes."""

import numpy as np
import pytest

from optimc_passes.frontend.rules import GatherRows, MergeReshapes, NormalizeBeforeTranspose

RNG = np.random.default_rng(0)


def _rows(axis: int = -1) -> str:
    return f"""rows (float[1,T,8] x, int64[R] rows) => (float[1,R,8] y) <int64[1] axes = {{{axis}}}> {{
        moved = Transpose <perm = [1, 0, 2]> (x)
        indices = Unsqueeze (rows, axes)
        picked = GatherND (moved, indices)
        y = Transpose <perm = [1, 0, 2]> (picked)
    }}"""


def test_gather_rows_fires_once_and_computes_the_same(apply_rule):
    applied = apply_rule(GatherRows, _rows())
    assert applied.times == 1
    assert applied.operators == {"Gather": 1}
    applied.assert_equal(x=RNG.standard_normal((1, 5, 8)).astype(np.float32), rows=np.array([4, 0, 0]))


def test_gather_rows_declines_indices_along_another_axis(apply_rule):
    applied = apply_rule(GatherRows, _rows(axis=0))
    assert applied.times == 0
    assert applied.reason == "the rows are not a plain vector of indices"


def _reshapes(x: str, inner: str, outer: str, y: str) -> str:
    def rank(shape: str) -> int:
        return shape.count(",") + 1

    return f"""reshapes (float[{x}] x) => (float[{y}] y)
    <int64[{rank(inner)}] inner = {{{inner}}}, int64[{rank(outer)}] outer = {{{outer}}}> {{
        middle = Reshape (x, inner)
        y = Reshape <allowzero = 1> (middle, outer)
    }}"""


@pytest.mark.parametrize(
    ("x", "inner", "outer", "y", "left"),
    [
        ("1,T,8", "1, -1, 2, 4", "-1, 8", "T,8", {"Reshape": 1}),
        ("1,T,8", "1, -1, 2, 4", "1, -1, 8", "1,T,8", {"Identity": 1}),
        ("1,T,8", "1, -1, 2, 4", "1, -1, 4", "1,N,4", {"Reshape": 1}),
    ],
    ids=["to another shape", "back to the shape it had", "to another shape of the same rank"],
)
def test_merge_reshapes_keeps_at_most_one(apply_rule, x, inner, outer, y, left):
    applied = apply_rule(MergeReshapes, _reshapes(x, inner, outer, y))
    assert applied.times == 1
    assert applied.operators == left
    applied.assert_equal(x=RNG.standard_normal((1, 5, 8)).astype(np.float32))


def test_merge_reshapes_declines_a_copied_dimension(apply_rule):
    applied = apply_rule(MergeReshapes, _reshapes("1,T,8", "1, -1, 2, 4", "0, -1", "1,N"))
    assert applied.times == 0
    assert applied.reason == "the shape is not constant, or copies a dimension"


def _norm(axis: int) -> str:
    return f"""norm (float[1,T,2,8] x, float[8] scale) => (float[1,2,T,8] y) {{
        moved = Transpose <perm = [0, 2, 1, 3]> (x)
        y = RMSNormalization <axis = {axis}, epsilon = 0.01> (moved, scale)
    }}"""


def test_normalize_before_transpose_fires_once_and_computes_the_same(apply_rule):
    applied = apply_rule(NormalizeBeforeTranspose, _norm(-1))
    assert applied.times == 1
    assert [node.op_type for node in applied.after.graph] == ["RMSNormalization", "Transpose"]
    x = RNG.standard_normal((1, 5, 2, 8)).astype(np.float32) * 0.1
    applied.assert_equal(x=x, scale=np.arange(8, dtype=np.float32))


def test_normalize_before_transpose_declines_a_norm_over_two_axes(apply_rule):
    applied = apply_rule(NormalizeBeforeTranspose, _norm(2))
    assert applied.times == 0
    assert applied.reason == "the norm is not over the last axis only"
