"""Search spaces: read, checked, and what a recipe offers by itself."""

import pytest

from optimc.errors import ConfigError
from optimc.measure.search.space import Space, overrides_of, point_key, switches_of
from optimc.measure.store import EngineSwitches
from optimc.recipe import Recipe


def faults(data):
    with pytest.raises(ConfigError) as caught:
        Space.load(data, "space.yaml")
    return [str(fault) for fault in caught.value.faults]


def recipe(passes, **target):
    return Recipe.model_validate({"name": "r", "model": "m", "passes": passes, "target": target})


def test_a_file_is_read(tmp_path):
    path = tmp_path / "space.yaml"
    path.write_text("choices: {passes.rtn.bits: [4, 8], serve.max_seqs: [16, 64]}\nobjective: tokens_per_s\n")
    space = Space.read(path)
    assert space == Space({"passes.rtn.bits": (4, 8), "serve.max_seqs": (16, 64)}, "tokens_per_s")
    assert (space.size, space.maximised) == (4, True)
    assert list(space.points())[1] == {"passes.rtn.bits": 4, "serve.max_seqs": 64}


def test_all_faults_are_told_at_once():
    data = {
        "choices": {
            "passes.rtn.bits": 4,
            "passes.rtn.group_size": [],
            "target.kv_dtype": ["int8", "int8"],
            "serve.max_seq": [1],
            "serve.max_seqs": [0],
            "serve.speculation": ["fast"],
            "limits": [{"max_seqs": 3}],
        },
        "objective": "speed",
        "trials": 3,
    }
    found = faults(data)
    assert len(found) == 9
    assert found[0] == "trials: unknown key; known: choices, objective"
    assert found[1] == "choices.passes.rtn.bits: must be a list of values, got 4"
    assert "given twice" in found[3]
    assert "no such switch of the engine; known: prefix_cache" in found[4]
    assert "at least 1, got 0" in found[5]
    assert "must be auto, medusa" in found[6]
    assert found[8].startswith("objective: must be one of tpot_p50_ms")


@pytest.mark.parametrize("values", [[4, 4.0], [1, True], [0.5, 0.5]])
def test_values_that_the_sampler_takes_for_one_are_refused(values):
    assert "given twice" in faults({"choices": {"passes.rtn.bits": values}})[0]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_no_number_is_refused(value):
    assert "values are numbers" in faults({"choices": {"passes.rtn.damp": [0.1, value]}})[0]


def test_what_is_no_mapping_or_empty_is_refused():
    assert "mapping" in faults([1])[0]
    assert faults({})[0].startswith("choices: must map at least one path")


def test_a_recipe_offers_bits_groups_kv_and_heads():
    passes = [
        {"name": "gptq", "options": {"bits": 4}},
        {"name": "fuse"},
        {"name": "medusa", "options": {"heads": 3}},
    ]
    assert Space.of_recipe(recipe(passes)).choices == {
        "passes.gptq.bits": (4, 8),
        "passes.gptq.group_size": (32, 64, 128),
        "passes.medusa.heads": (2, 3, 5),
        "target.kv_dtype": ("float32", "bfloat16", "int8"),
    }


def test_passes_that_occur_twice_are_named_by_position_and_chosen_bits_are_left_alone():
    passes = [{"name": "rtn"}, {"name": "rtn"}, {"name": "gptq", "options": {"bits": "auto"}}, {"name": "kv_quant"}]
    assert list(Space.of_recipe(recipe(passes)).choices) == [
        "passes.0.bits",
        "passes.0.group_size",
        "passes.1.bits",
        "passes.1.group_size",
        "passes.kv_quant.dtype",
    ]


def test_a_recipe_with_nothing_to_choose_asks_for_a_space():
    with pytest.raises(ConfigError, match="--space"):
        Space.of_recipe(recipe([{"name": "fuse"}], backend="onnxruntime"))


def test_a_point_is_overrides_and_switches():
    point = {"target.kv_dtype": "int8", "serve.max_seqs": 16, "passes.rtn.symmetric": True}
    assert overrides_of(point) == ('target.kv_dtype="int8"', "passes.rtn.symmetric=true")
    assert switches_of(point, EngineSwitches(threads=2)) == EngineSwitches(threads=2, max_seqs=16)
    assert point_key(point) == point_key(dict(reversed(point.items())))
