"""Recipes: all faults at once with their lines, overrides, a schema that says the same."""

from pathlib import Path
from typing import Literal

import jsonschema
import pytest
import yaml
from pydantic import BaseModel, ConfigDict

from optimc.errors import ConfigError
from optimc.recipe import load_recipe, recipe_schema


class Rounding(BaseModel):
    """Round."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    bits: Literal[4, 8] = 4
    group_size: int = 64


class Merge(BaseModel):
    """Merge."""

    model_config = ConfigDict(frozen=True, extra="forbid")


CONFIGS = {"rtn": Rounding, "merge": Merge}

GOOD = """\
name: tiny
model: some/folder
passes:
  - rtn: {bits: 8}
  - merge
limits: {max_seqs: 4, kv_memory: 512MiB}
quality: {max_kl: 1e-3}
"""


@pytest.fixture
def load(tmp_path):
    def load(text: str, *overrides: str):
        path = tmp_path / "recipe.yaml"
        path.write_text(text)
        return load_recipe(path, pass_configs=CONFIGS, overrides=overrides)

    return load


def faults(load, text, *overrides):
    with pytest.raises(ConfigError) as caught:
        load(text, *overrides)
    return [str(fault) for fault in caught.value.faults]


def test_a_good_recipe_is_read_with_defaults_written_out(load):
    recipe = load(GOOD)
    assert recipe.model.source == "some/folder"
    assert [(p.name, p.options) for p in recipe.passes] == [("rtn", {"bits": 8, "group_size": 64}), ("merge", {})]
    assert recipe.limits.kv_memory == 512 << 20
    assert recipe.quality.max_kl == 1e-3
    assert recipe.verify == "numeric"


def test_three_faults_are_three_lines_with_numbers(load):
    text = GOOD.replace("bits: 8", "bits: 5").replace("max_seqs: 4", "max_seqs: 0") + "bogus: 1\n"
    assert faults(load, text) == [
        "line 4: passes[0].rtn.bits: input should be 4 or 8, got 5",
        "line 6: limits.max_seqs: input should be greater than 0, got 0",
        "line 8: bogus: unknown key; known: calibration, limits, model, name, passes, quality, report, target, verify",
    ]


def test_the_message_lists_every_fault(load):
    with pytest.raises(ConfigError) as caught:
        load("passes: [nope]\n")
    text = str(caught.value)
    assert "3 faults" in text
    assert "name: is required" in text
    assert "model: is required" in text
    assert "passes[0].nope: unknown pass; known: merge, rtn" in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: [", "not valid YAML"),
        ("- a\n- b\n", "a recipe is a mapping"),
        ("", "name: is required"),
        (GOOD + "name: again\n", "name: given twice"),
        (GOOD.replace("512MiB", "12 parsecs"), "'12 parsecs' is not a size"),
        (GOOD.replace("- merge\n", "- {rtn: {}, merge: {}}\n"), "write a pass as"),
        (GOOD.replace("- merge\n", "- merge: 3\n"), "options must be a mapping"),
        (GOOD.replace("- merge\n", "- rtn: {group: 3}\n"), "unknown key; known: bits, group_size"),
        (GOOD.replace("some/folder", "{source: x, revision: 3}"), "input should be a valid string, got 3"),
        (GOOD.replace("max_seqs: 4", 'max_seqs: "4"'), "input should be a valid integer, got '4'"),
        (GOOD.replace("name: tiny", "name: ../evil"), "string should match pattern"),
        (GOOD.replace("max_kl: 1e-3", "max_kl: .nan"), "quality.max_kl"),
    ],
)
def test_bad_recipes_say_what_and_where(load, text, message):
    assert any(message in fault for fault in faults(load, text))


def test_an_alias_bomb_is_refused_quickly(load):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    assert any("more than" in fault for fault in faults(load, "\n".join(lines)))


def test_yaml_numbers_and_words_mean_what_people_write(load):
    assert load(GOOD.replace("name: tiny", "name: on")).name == "on"
    assert load(GOOD.replace("1e-3", "1.0e-3")).quality.max_kl == 1e-3


def test_binary_and_missing_files_are_one_line(tmp_path):
    for content in (b"\xff\xfe\x00bad", None):
        path = tmp_path / "r.yaml"
        if content is not None:
            path.write_bytes(content)
        else:
            path.unlink()
        with pytest.raises(ConfigError) as caught:
            load_recipe(path, pass_configs=CONFIGS)
        assert len(caught.value.faults) == 1


def test_overrides_reach_passes_sections_and_the_model(load):
    recipe = load(GOOD, "passes.rtn.bits=4", "limits.max_seqs=9", "model.revision=abc")
    assert recipe.passes[0].options["bits"] == 4
    assert recipe.limits.max_seqs == 9
    assert (recipe.model.source, recipe.model.revision) == ("some/folder", "abc")


def test_an_override_does_not_reach_the_default_of_another_pass(load):
    recipe = load(GOOD, "passes.0.group_size=32")
    assert recipe.passes[0].options == {"bits": 8, "group_size": 32}
    assert recipe.passes[1].options == {}


def test_of_a_pass_that_runs_twice_an_override_names_one_by_position(load):
    twice = GOOD.replace("- merge\n", "- merge\n  - rtn: {bits: 4}\n")
    assert [spec.options.get("bits") for spec in load(twice, "passes.2.bits=8").passes] == [8, None, 8]
    message = "pass 'rtn' occurs 2 times; name it by position, 0 to 2"
    assert any(message in fault for fault in faults(load, twice, "passes.rtn.bits=8"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("passes.rtn.bits", "write it as path=value"),
        ("passes.gptq.bits=4", "no pass 'gptq' in the recipe; it has: rtn, merge"),
        ("passes.rtn=4", "name the option too"),
        ("passes.rtn.bits=[", "not valid YAML"),
        ("name.x=4", "'name' is not a mapping"),
        ("limits.bogus=4", "limits.bogus: unknown key"),
        ("..=4", "write it as path=value"),
    ],
)
def test_bad_overrides_are_faults_like_any_other(load, override, message):
    assert any(message in fault for fault in faults(load, GOOD, override))


def test_digest_follows_meaning_not_spelling(load):
    base = load(GOOD).digest
    assert load(GOOD.replace("512MiB", str(512 << 20))).digest == base
    assert load(GOOD.replace("rtn: {bits: 8}", "rtn: {bits: 8, group_size: 64}")).digest == base
    assert load(GOOD.replace("bits: 8", "bits: 4")).digest != base


@pytest.mark.parametrize(
    "section", ["ModelSpec", "TargetSpec", "CalibrationSpec", "LimitsSpec", "QualitySpec", "ReportSpec"]
)
def test_every_key_of_a_section_is_described_in_the_schema(section):
    keys = recipe_schema(CONFIGS)["$defs"][section]["properties"]
    assert [key for key, facts in keys.items() if not facts.get("description")] == []


def test_the_schema_accepts_and_refuses_what_the_loader_does():
    schema = recipe_schema(CONFIGS)
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    good = yaml.safe_load(GOOD.replace("1e-3", "0.001"))
    assert not list(validator.iter_errors(good))
    for entry in ("mine:Drop", {"mine.more:Drop": None}, {"mine:Drop": {"depth": 2}}):
        assert not list(validator.iter_errors(good | {"passes": [entry]})), entry
    for change in ({"passes": ["mine:"]}, {"passes": [{"mine:Drop": 3}]}, {"passes": [{"a:B": None, "c:D": None}]}):
        assert list(validator.iter_errors(good | change)), change
    for change in ({"bogus": 1}, {"passes": ["nope"]}, {"passes": [{"rtn": {"bits": 5}}]}, {"model": 3}):
        assert list(validator.iter_errors(good | change)), change


@pytest.mark.parametrize("path", sorted(Path("recipes").rglob("*.yaml")), ids=lambda p: p.stem)
def test_every_shipped_recipe_loads(path):
    from optimc.build import pass_configs

    recipe = load_recipe(path, pass_configs=pass_configs())
    assert recipe.name == path.stem


@pytest.mark.parametrize(
    ("written", "meant"),
    [("010", 10), ("0o10", 8), ("0x10", 16), ("+3", 3)],
)
def test_numbers_are_those_of_yaml_1_2(load, written, meant):
    assert load(GOOD.replace("max_seqs: 4", f"max_seqs: {written}")).limits.max_seqs == meant


def test_a_date_and_a_time_are_words(load):
    assert load(GOOD.replace("name: tiny", "name: 2024-01-31")).name == "2024-01-31"
    assert any("got '1:30'" in fault for fault in faults(load, GOOD.replace("max_seqs: 4", "max_seqs: 1:30")))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (GOOD.replace("512MiB", "9" * 400 + "GiB"), "limits.kv_memory: input should be less than or equal to"),
        (GOOD.replace("max_seqs: 4", "max_seqs: " + "9" * 30), "limits.max_seqs: input should be less than or equal"),
        (GOOD.replace("tiny", "ti\0ny"), "not valid YAML: unacceptable character"),
        (GOOD + "3: 4\n", "line 8: 3: keys should be strings"),
    ],
)
def test_absurd_values_are_faults_like_any_other(load, wrong, message):
    assert any(message in fault for fault in faults(load, wrong))


def test_only_plain_digits_are_a_position(load):
    assert any("no pass '²'" in fault for fault in faults(load, GOOD, "passes.².bits=8"))
    assert any("unacceptable character" in fault for fault in faults(load, GOOD, "name=a\0"))


TENSORRT = "target: {backend: tensorrt, flavor: rtx, gpu: [sm_89, sm_120], precision: bfloat16}\n"


def test_the_keys_of_the_tensorrt_target_are_read_and_in_the_schema(load):
    target = load(GOOD + TENSORRT).target
    assert (target.flavor, target.gpu, target.precision) == ("rtx", ("sm_89", "sm_120"), "bfloat16")
    assert (target.kv_dtype, target.builder_level) == (None, None)
    properties = recipe_schema(CONFIGS)["$defs"]["TargetSpec"]["properties"]
    assert "builds on the GPU that serves" in properties["flavor"]["description"]
    good = yaml.safe_load(GOOD.replace("1e-3", "0.001") + TENSORRT)
    assert not list(jsonschema.Draft202012Validator(recipe_schema(CONFIGS)).iter_errors(good))


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("{flavor: lean}", "target.flavor: input should be 'tensorrt' or 'rtx', got 'lean'"),
        ("{precision: float32}", "target.precision: input should be 'float16' or 'bfloat16', got 'float32'"),
        ("{gpu: [sm_89, 8.6]}", "target.gpu[1]: input should be a valid string, got 8.6"),
        ("{gpu: [ada]}", "target.gpu[0]: string should match pattern"),
        ("{gpu: sm_89}", "target.gpu: input should be a valid tuple, got 'sm_89'"),
        ("{builder_level: 6}", "target.builder_level: input should be less than or equal to 5, got 6"),
    ],
)
def test_their_values_are_checked(load, target, message):
    (fault,) = faults(load, GOOD + f"target: {target}\n")
    assert message in fault
