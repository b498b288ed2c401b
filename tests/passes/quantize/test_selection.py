import pytest

from optimc_passes.quantize.linears import LinearWeight
from optimc_passes.quantize.selection import matches, select

UP = LinearWeight("model.layers.0.mlp.up_proj.weight", (200, 96))
DOWN = LinearWeight("model.layers.0.mlp.down_proj.weight", (96, 200))
KEY = LinearWeight("model.layers.0.self_attn.k_proj.weight", (12, 96))
HEAD = LinearWeight("embed_out.weight", (384, 96), is_head=True)
ALL = (UP, DOWN, KEY, HEAD)


def test_a_group_size_that_does_not_divide_names_every_layer_with_shape_and_remedy():
    problems = select(ALL, ["lm_head"], 64, "error").problems
    assert problems == (
        "model.layers.0.mlp.up_proj: 96 columns not divisible by group_size 64 (shape [200, 96]); "
        "use 8 or add it to ignore, or set ragged to ragged or skip",
        "model.layers.0.mlp.down_proj: 200 columns not divisible by group_size 64 (shape [96, 200]); "
        "use 8 or add it to ignore, or set ragged to ragged or skip",
        "model.layers.0.self_attn.k_proj: 96 columns not divisible by group_size 64 (shape [12, 96]); "
        "use 8 or add it to ignore, or set ragged to ragged or skip",
    )


def test_ignored_layers_need_not_divide():
    assert not select(ALL, ["lm_head", "*.down_proj"], 32, "error").problems


def test_skip_leaves_them_dense_and_ragged_takes_them():
    skipped = select(ALL, ["lm_head"], 48, "skip")
    assert (skipped.chosen, skipped.ignored, skipped.skipped) == ((UP, KEY), (HEAD,), (DOWN,))
    ragged = select(ALL, ["lm_head"], 48, "ragged")
    assert (ragged.chosen, ragged.skipped, ragged.problems) == ((UP, DOWN, KEY), (), ())


def test_one_group_per_row_divides_everything():
    assert select(ALL, [], -1, "error").chosen == ALL


def test_a_pattern_that_matches_nothing_is_a_problem_but_the_head_need_not_exist():
    assert select(ALL, ["*.dwon_proj"], -1, "error").problems == (
        "ignore pattern '*.dwon_proj' matches no linear layer, for example model.layers.0.mlp.up_proj",
    )
    assert not select((UP, DOWN), ["lm_head"], -1, "error").problems


@pytest.mark.parametrize(("group_size", "ignore"), [(64, ["*"]), (7, ["lm_head"])])
def test_nothing_left_to_quantize_is_a_problem(group_size, ignore):
    assert "nothing to quantize" in select(ALL, ignore, group_size, "skip").problems[0]


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
