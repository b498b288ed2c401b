"""What a recipe asks of its target."""

from dataclasses import fields

from optimc.build.lowering_options import SECTIONS, lowering_options
from optimc.recipe import LimitsSpec, TargetSpec
from optimc_passes.emit import LoweringOptions


def test_every_option_has_its_place_in_the_recipe():
    keys = {"target": TargetSpec.model_fields, "limits": LimitsSpec.model_fields}
    # Hidden states are what a build wants for its own use, and it alone knows its cache; no recipe asks for them.
    asked = {field.name for field in fields(LoweringOptions)} - {"hidden", "cache"}
    assert sorted(SECTIONS) == sorted(asked)
    assert [option for option, section in SECTIONS.items() if option not in keys[section]] == []


def test_options_are_what_the_recipe_says():
    target = TargetSpec(int8_activations=False, activation_scales="row", kv_dtype="int8")
    limits = LimitsSpec(block_size=32, max_step_tokens=96, max_seqs=7)
    assert lowering_options(target, limits) == LoweringOptions(
        block_size=32,
        int8_activations=False,
        activation_scales="row",
        kv_dtype="int8",
        max_step_tokens=96,
        max_seqs=7,
    )


def test_a_longest_sequence_the_recipe_leaves_open_is_the_models():
    assert lowering_options(TargetSpec(), LimitsSpec(), max_seq_len=4096).max_seq_len == 4096
    assert lowering_options(TargetSpec(), LimitsSpec(max_seq_len=512), max_seq_len=4096).max_seq_len == 512


def test_what_only_tensorrt_has_is_passed_on():
    target = TargetSpec(backend="tensorrt", flavor="rtx", precision="bfloat16", gpu=("sm_89",), builder_level=5)
    options = lowering_options(target, LimitsSpec())
    assert (options.flavor, options.precision, options.gpu) == ("rtx", "bfloat16", ("sm_89",))
    assert (options.builder_level, options.kv_dtype) == (5, None)
