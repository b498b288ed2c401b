"""What a recipe asks of its target."""

from dataclasses import fields

from optimc.build.lowering_options import SECTIONS, lowering_options
from optimc.recipe import LimitsSpec, TargetSpec
from optimc_passes.emit import LoweringOptions


def test_every_option_has_its_place_in_the_recipe():
    keys = {"target": TargetSpec.model_fields, "limits": LimitsSpec.model_fields}
    # Hidden states are what a build wants for its own use, no recipe asks for them.
    asked = {field.name for field in fields(LoweringOptions)} - {"hidden"}
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
