"""What of each shipped recipe can be switched off alone, written down by hand."""

from pathlib import Path

import pytest

from optimc.build import BuildOptions
from optimc.measure.attribution.factors import factors_of, heads_speculation
from optimc.measure.attribution.recipe_file import RecipeFile
from optimc.measure.attribution.variants import cumulative, everything, leave_one_out
from optimc.measure.store import EngineSwitches

RECIPES = Path("recipes")
RUNTIME = ["inflight_batching", "chunked_prefill", "prefix_cache"]
BY_HAND = {
    "smollm2-fp32": ["fuse[0]"],
    "smollm2-int4": ["rtn[0]", "rtn[1]", "fuse[2]", "int8_activations"],
    "smollm2-int4-awq": ["awq[0]", "fuse[1]", "int8_activations"],
    # gptq alone cannot go: awq leaves the rounding to it.
    "smollm2-int4-awq-gptq": ["awq+gptq", "fuse[2]", "int8_activations"],
    "smollm2-int4-g32": ["rtn[0]", "rtn[1]", "fuse[2]", "kv_dtype", "int8_activations"],
    "smollm2-int4-gptq": ["gptq[0]", "fuse[1]", "int8_activations"],
    "smollm2-int4-kv8": ["gptq[0]", "kv_quant[1]", "fuse[2]", "int8_activations"],
    "smollm2-int4-medusa": ["rtn[0]", "rtn[1]", "fuse[2]", "medusa[3]+speculation", "int8_activations"],
    # and gptq's bits are those that auto_bits chose.
    "smollm2-int4-mixed": ["awq+auto_bits+gptq", "fuse[3]", "int8_activations"],
    # No 8-bit activations unless asked for.
    "smollm2-int4-onnxruntime": ["rtn[0]", "fuse[1]"],
    "smollm2-rtx-int4": ["rtn[0]", "rtn[1]", "fuse[2]"],
    "smollm2-int8": ["rtn[0]", "fuse[1]", "int8_activations"],
    "smollm2-w8a8": ["smoothquant[0]", "fuse[1]", "int8_activations"],
}


@pytest.fixture
def read(tmp_path):
    def read(path, *overrides):
        options = BuildOptions(cache_dir=tmp_path / "cache", output_dir=tmp_path, overrides=overrides)
        return RecipeFile.read(path, options)

    return read


@pytest.fixture
def recipe(tmp_path, read):
    """A recipe by its passes."""
    (tmp_path / "model").mkdir()

    def make(passes, extra="", *overrides):
        path = tmp_path / "r.yaml"
        path.write_text(f"name: r\nmodel: {tmp_path / 'model'}\ncalibration: {{samples: 4}}\npasses: {passes}\n{extra}")
        return read(path, *overrides)

    return make


def names(file, speculation="off"):
    return [factor.name for factor in factors_of(file, speculation)]


def test_every_shipped_recipe_is_in_the_list():
    assert sorted(path.stem for path in RECIPES.glob("*.yaml")) == sorted(BY_HAND)


@pytest.mark.parametrize("name", BY_HAND)
def test_factors_of_a_shipped_recipe_by_hand(name, read):
    file = read(RECIPES / f"{name}.yaml")
    factors = factors_of(file, heads_speculation(file.recipe))
    assert [factor.name for factor in factors] == BY_HAND[name] + RUNTIME
    assert [factor.na for factor in factors] == [None] * len(factors)
    # Each variant has been through the loader that builds use.
    switches = EngineSwitches(speculation=heads_speculation(file.recipe))
    steps = [*leave_one_out(file, factors, switches), *cumulative(file, factors, switches)]
    assert all(side.refusal is None and side.recipe is not None for s in steps for side in (s.with_, s.without))


def test_the_bare_recipe_has_no_pass_no_kv_format_and_every_switch_off(read):
    file = read(RECIPES / "smollm2-int4-g32.yaml")
    bare = everything(file, factors_of(file), EngineSwitches()).without
    assert bare.recipe.passes == ()
    assert (bare.recipe.target.kv_dtype, bare.recipe.target.int8_activations) == ("float32", False)
    switches = EngineSwitches(prefix_cache=False, chunked_prefill=False, inflight_batching=False)
    assert bare.switches == switches


def test_cumulative_goes_from_the_bare_recipe_to_the_whole_one_a_factor_at_a_time(read):
    file = read(RECIPES / "smollm2-int4.yaml")
    factors = factors_of(file)
    steps = cumulative(file, factors, EngineSwitches())
    every = {factor.name for factor in factors}
    assert steps[0].without.removed == every
    assert steps[-1].with_.removed == set()
    assert [step.with_.removed | {step.factor} for step in steps] == [step.without.removed for step in steps]
    assert steps[-1].with_.name == "smollm2-int4", "the whole recipe keeps its name, and so its plan"


def test_a_variant_is_another_plan_of_its_own_name_with_the_other_passes_as_written(read):
    file = read(RECIPES / "smollm2-int4.yaml")
    step = leave_one_out(file, factors_of(file), EngineSwitches())[1]
    assert step.factor == "rtn[1]"
    assert step.without.name == "smollm2-int4--without-rtn-1"
    assert [spec.name for spec in step.without.recipe.passes] == ["rtn", "fuse"]
    assert step.without.recipe.passes[0] == file.recipe.passes[0]
    assert step.without.switches == EngineSwitches()


def test_a_runtime_feature_is_another_switch_of_the_same_plan(read):
    file = read(RECIPES / "smollm2-int4.yaml")
    step = leave_one_out(file, factors_of(file), EngineSwitches())[-1]
    assert step.factor == "prefix_cache"
    assert step.without.name == step.with_.name == "smollm2-int4"
    assert step.without.switches == EngineSwitches(prefix_cache=False)


def test_the_users_own_changes_stay_in_every_variant(read):
    file = read(RECIPES / "smollm2-int4.yaml", "passes.0.bits=8")
    step = leave_one_out(file, factors_of(file), EngineSwitches())[1]
    assert step.without.recipe.passes[0].options["bits"] == 8


def test_speculation_is_a_factor_where_it_is_asked_for(recipe):
    assert names(recipe("[fuse]"), "ngram") == ["fuse[0]", *RUNTIME, "speculation"]
    assert names(recipe("[fuse]")) == ["fuse[0]", *RUNTIME]


def test_what_the_loader_refuses_becomes_one_factor_with_what_it_needs(recipe):
    # Without auto_bits nobody chooses the cache's format for kv_quant; the loader says so.
    file = recipe(
        "[{auto_bits: {average_bits: 5, kv: {average_bits: 8}}}, {gptq: {bits: auto}}, {kv_quant: {dtype: auto}}, fuse]"
    )
    assert names(file)[:2] == ["auto_bits+gptq+kv_quant", "fuse[3]"]


def test_a_factor_that_nothing_goes_with_is_not_measured_and_quotes_the_refusal(recipe):
    file = recipe("[{smoothquant: {activations: static}}, fuse]")
    refused = next(factor for factor in factors_of(file) if factor.name == "int8_activations")
    assert refused.na == (
        "cannot be switched off: passes[0].smoothquant.activations: static scales round activations, "
        "and target int8_activations: false forbids it"
    )
    steps = leave_one_out(file, factors_of(file), EngineSwitches())
    assert "int8_activations" not in [step.factor for step in steps]


def test_names_of_many_factors_stay_names(recipe):
    file = recipe("[" + ", ".join([f"{{rtn: {{only: ['model.layers.{n}.*']}}}}" for n in range(12)]) + ", fuse]")
    bare = everything(file, factors_of(file), EngineSwitches()).without
    assert bare.refusal is None
    assert len(bare.name) <= 100
