import re

import pytest

from optimc_passes.quantize.linears import LinearWeight
from optimc_passes.quantize.selection import matches, select

UP = LinearWeight("model.layers.0.mlp.up_proj.weight", (200, 96))
DOWN = LinearWeight("model.layers.0.mlp.down_proj.weight", (96, 200))
KEY = LinearWeight("model.layers.0.self_attn.k_proj.weight", (12, 96))
HEAD = LinearWeight("embed_out.weight", (384, 96), is_head=True)
ALL = (UP, DOWN, KEY, HEAD)


def choose(linears=ALL, *, only=("*",), ignore=("lm_head",), group_size=-1, ragged="error"):
    return select(linears, only=only, ignore=ignore, group_size=group_size, ragged=ragged)


def test_a_group_size_that_does_not_divide_is_one_sentence_per_width_with_the_remedy():
    assert choose(group_size=64).problems == (
        "96 columns (2 layers, e.g. model.layers.0.mlp.up_proj): not divisible by group_size 64; "
        "use 8 or add the layers to ignore, or set ragged to ragged or skip",
        "200 columns (model.layers.0.mlp.down_proj): not divisible by group_size 64; "
        "use 8 or add the layers to ignore, or set ragged to ragged or skip",
    )


def test_the_remedy_is_a_power_of_two_where_one_divides():
    # 192 divides both, so would 96; kernels like 64.
    wide = (LinearWeight("a.weight", (8, 576)), LinearWeight("b.weight", (8, 1536)))
    (problem,) = choose(wide, group_size=128).problems
    assert problem.startswith("576 columns (a): not divisible by group_size 128; use 64 or ")


def test_ignored_layers_need_not_divide():
    assert not choose(ignore=["lm_head", "*.down_proj"], group_size=32).problems


def test_layers_that_only_does_not_name_need_not_divide_and_are_nowhere():
    selection = choose(only=["*.up_proj", "lm_head"], group_size=32)
    assert selection == ((UP,), (HEAD,), (), ())


def test_skip_leaves_them_dense_and_ragged_takes_them():
    skipped = choose(group_size=48, ragged="skip")
    assert (skipped.chosen, skipped.ignored, skipped.skipped) == ((UP, KEY), (HEAD,), (DOWN,))
    ragged = choose(group_size=48, ragged="ragged")
    assert (ragged.chosen, ragged.skipped, ragged.problems) == ((UP, DOWN, KEY), (), ())


def test_one_group_per_row_divides_everything():
    assert choose(ignore=[]).chosen == ALL


def test_a_pattern_that_matches_nothing_is_a_problem_but_the_head_that_is_ignored_need_not_exist():
    assert choose(ignore=["*.dwon_proj"]).problems == (
        "ignore pattern '*.dwon_proj' matches no linear layer, for example model.layers.0.mlp.up_proj",
    )
    assert choose(only=["*.up_proj", "*.pu_proj"]).problems == (
        "only pattern '*.pu_proj' matches no linear layer, for example model.layers.0.mlp.up_proj",
    )
    assert not choose((UP, DOWN)).problems
    assert choose((UP, DOWN), only=["lm_head"], ignore=[]).problems[0].startswith("only pattern 'lm_head' matches no")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"ignore": ["*"]}, r"ignore covers all that only names \(4 layers, e.g. model.layers.0.mlp.up_proj\)"),
        ({"only": ["lm_head"]}, r"ignore covers all that only names \(embed_out\); .*`ignore: \[\]`"),
        ({"group_size": 7, "ragged": "skip"}, "group_size 7 divides the columns of no layer"),
    ],
)
def test_nothing_left_to_quantize_is_a_problem(options, reason):
    (problem,) = choose(**options).problems
    assert re.match(f"nothing to quantize: {reason}", problem)


@pytest.mark.parametrize(
    ("pattern", "layer", "expected"),
    [
        ("lm_head", HEAD, True),
        ("lm_head", UP, False),
        ("embed_out", HEAD, True),
        ("*.up_proj", UP, True),
        ("model.layers.0.*", KEY, True),
        ("model.layers.0.mlp.up_proj.weight", UP, True),
        ("up_proj", UP, False),
        (r"re:.*\.(up|down)_proj", DOWN, True),
        (r"re:up", UP, False),
    ],
)
def test_patterns_are_globs_or_whole_regular_expressions(pattern, layer, expected):
    assert matches(layer, pattern) is expected


def test_hidden_96_intermediate_200_kv_12_names_exactly_those_layers():
    """Of a decoder layer whose keys and values have 12 features: only o_proj reads a width that 64 divides."""
    shapes = {
        "self_attn.q_proj": (128, 96),
        "self_attn.k_proj": (12, 96),
        "self_attn.v_proj": (12, 96),
        "self_attn.o_proj": (96, 128),
        "mlp.gate_proj": (200, 96),
        "mlp.up_proj": (200, 96),
        "mlp.down_proj": (96, 200),
    }
    linears = [LinearWeight(f"model.layers.0.{name}.weight", shape) for name, shape in shapes.items()]
    refused = select(linears, ignore=(), group_size=64, ragged="error")
    assert refused.problems == (
        "96 columns (5 layers, e.g. model.layers.0.self_attn.q_proj): not divisible by group_size 64; use 8 or add the "
        "layers to ignore, or set ragged to ragged or skip",
        "200 columns (model.layers.0.mlp.down_proj): not divisible by group_size 64; use 8 or add the layers to "
        "ignore, or set ragged to ragged or skip",
    )
    skipped = select(linears, ignore=(), group_size=64, ragged="skip")
    assert [linear.layer for linear in skipped.chosen] == ["model.layers.0.self_attn.o_proj"]
    for group_size, ragged in ((64, "ragged"), (-1, "error")):
        accepted = select(linears, ignore=(), group_size=group_size, ragged=ragged)
        assert accepted.problems == ()
        assert len(accepted.chosen) == 7
