"""What a recipe may write under `passes`, and which passes it stands for."""

from pathlib import Path

import pytest

from optimc.build import BuildOptions, read_inputs
from optimc.build.manifest import build_key
from optimc.build.pass_catalog import PassCatalog
from optimc.errors import ConfigError
from optimc_passes.fuse.pipeline import GRAPH_PASSES
from optimc_passes.registry import PASSES

NAMES = [pass_type.name for pass_type in GRAPH_PASSES]

USER_PASS = '''
from optimc_passes.base import Pass, PassConfig, PassResult


class Options(PassConfig):
    """None."""


class Mine(Pass[Options]):
    """Leaves all as it is."""

    name, version, stage, config_type = "mine", 1, "weights", Options

    def run(self, artifact, context):
        return PassResult(artifact)
'''


@pytest.fixture
def read(tmp_path):
    """Read a recipe in a folder of its own with these entries of `passes`."""
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "own.py").write_text(USER_PASS)

    def read(*entries, overrides=()):
        path = folder / "r.yaml"
        path.write_text("\n".join(["name: r", "model: organisation/name", "passes:", *(f"- {e}" for e in entries)]))
        options = BuildOptions(output_dir=tmp_path, cache_dir=tmp_path / "cache", overrides=overrides)
        return read_inputs(path, options)

    return read


def names(inputs):
    return [pass_.name for pass_ in inputs.passes]


def faults(read, *entries):
    with pytest.raises(ConfigError) as caught:
        read(*entries)
    return [str(fault) for fault in caught.value.faults]


def test_fuse_stands_for_every_rewrite_in_order(read):
    assert names(read("rtn", "fuse")) == ["rtn", *NAMES]
    assert len(set(NAMES)) == len(NAMES) > 1
    assert {*NAMES} <= {*PASSES}, "each can be named by itself"


def test_fuse_may_skip_some(read):
    assert names(read("fuse: {skip: [merge_qkv]}")) == [name for name in NAMES if name != "merge_qkv"]
    assert names(read("fuse", overrides=("passes.fuse.skip=[merge_gate_up]",))) == [
        name for name in NAMES if name != "merge_gate_up"
    ]


def test_what_is_skipped_must_exist(read):
    (fault,) = faults(read, "fuse: {skip: [merge_qkv, merge_qkw]}")
    assert fault.startswith("line 4: passes[0].fuse.skip: unknown: merge_qkw; known: ")
    assert "merge_gate_up" in fault


def test_single_rewrites_are_still_passes(read):
    assert names(read("merge_gate_up", "merge_qkv")) == ["merge_gate_up", "merge_qkv"]


def test_a_weight_pass_after_fuse_is_refused_once(read):
    (fault,) = faults(read, "fuse", "rtn")
    assert fault == f"line 5: passes[1]: rtn changes weights and must come before {NAMES[0]}"


def test_a_pass_beside_the_recipe_is_found_from_any_working_directory(read):
    inputs = read("rtn", "own:Mine", "fuse")
    assert names(inputs) == ["rtn", "mine", *NAMES]
    assert [spec.name for spec in inputs.recipe.passes] == ["rtn", "own:Mine", "fuse"]


def test_a_pass_that_cannot_be_loaded_is_a_fault_beside_the_others(read):
    found = faults(read, "own:Yours", "rtn: {bits: 5}", "nope", "own:Mine: {depth: 3}")
    assert [fault.split(" ")[2] for fault in found] == [
        "passes[0].own:Yours:",
        "passes[1].rtn.bits:",
        "passes[2].nope:",
        "passes[3].own:Mine.depth:",
    ]
    assert "own has no Yours; its passes: Mine" in found[0]
    assert "unknown pass; known: " in found[2]
    assert ", fuse, " in found[2]


@pytest.mark.parametrize(
    ("old", "new", "where", "said"),
    [
        ('"""None."""', 'times: object = object()\n    """Any."""', ".own:Mine", "its options cannot be read: "),
        (
            '"""None."""',
            "def model_post_init(self, context):\n        1 / 0",
            ".own:Mine",
            "its options cannot be read: ZeroDivisionError: division by zero (",
        ),
        (
            "def run(",
            "def __init__(self):\n        pass\n\n    def run(",
            "",
            "Mine cannot be made with its options: TypeError: Mine.__init__() takes 1",
        ),
        (
            "def run(",
            "def describe_config(self):\n        return 1 / 0\n\n    def run(",
            "",
            "Mine cannot be made with its options: ZeroDivisionError: division by zero (",
        ),
    ],
)
def test_options_that_break_a_users_own_code_are_a_fault(read, tmp_path, old, new, where, said):
    assert old in USER_PASS
    (tmp_path / "recipes" / "own.py").write_text(USER_PASS.replace(old, new))
    (fault,) = faults(read, "rtn", "own:Mine")
    assert f"passes[1]{where}: {said}" in fault


def test_two_passes_of_one_name_are_refused(read, tmp_path):
    other = tmp_path / "recipes" / "other.py"
    other.write_text(USER_PASS.replace("class Mine", "class Yours"))
    assert names(read("own:Mine", "own:Mine")) == ["mine", "mine"], "one pass may run twice"
    (fault,) = faults(read, "own:Mine", "rtn", "other:Yours")
    assert fault == "line 6: passes[2]: Yours is named 'mine' as passes[0] is, Mine; rename one"


def test_the_build_key_depends_on_each_pass_its_version_and_its_file(read, monkeypatch, tmp_path):
    def key():
        inputs = read("rtn", "rtn: {bits: 8, only: [lm_head], ignore: []}", "own:Mine", "fuse")
        return build_key(inputs.recipe, inputs.passes, "m")

    first = key()
    assert key() == first
    with monkeypatch.context() as patch:
        patch.setattr(PASSES["merge_gate_up"], "version", 99)
        assert key() != first
    (tmp_path / "recipes" / "own.py").write_text(USER_PASS + "\n")
    assert key() != first


def test_the_catalog_lists_what_exists_without_a_recipe(tmp_path):
    catalog = PassCatalog(tmp_path)
    assert set(catalog) == {*PASSES, "fuse"}
    assert len(catalog) == len(set(catalog))
    assert "rtn" in catalog
    assert "rtm" not in catalog


def test_heads_to_take_over_are_looked_for_beside_the_recipe(tmp_path):
    (tmp_path / "published").mkdir()
    (pass_,) = PassCatalog(tmp_path).make("medusa", {"from": "published"}, "passes[0]")
    assert pass_.config.from_ == str(tmp_path / "published")
    with pytest.raises(ConfigError, match=r"passes\[0\].from: 'unpublished' is neither a folder nor a file"):
        PassCatalog(tmp_path).make("medusa", {"from": "unpublished"}, "passes[0]")


def test_the_schema_of_heads_has_the_keys_recipes_use():
    assert "from" in PassCatalog(Path())["medusa"].model_json_schema()["properties"]
