"""A recipe may name a pass of its author's: found, checked, part of the cache key."""

import textwrap
from pathlib import Path

import pytest

from optimc.errors import ConfigError
from optimc_passes.artifact import Artifact
from optimc_passes.pass_contract import contract_faults
from optimc_passes.registry import PASSES
from optimc_passes.user_pass import is_user_pass, load_user_pass

GOOD = '''
from __future__ import annotations

from optimc_passes.base import Pass, PassConfig, PassResult


class Options(PassConfig):
    times: int = 1
    """How often to do nothing."""


class DoNothing(Pass[Options]):
    """Leaves all as it is."""

    name, version, stage, config_type = "do_nothing", 1, "weights", Options

    def run(self, artifact, context):
        return PassResult(artifact, {"times": self.config.times})
'''


@pytest.fixture
def write(tmp_path):
    def write(text, name="mine.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return tmp_path

    return write


def faults(spec, folder, **options):
    with pytest.raises(ConfigError) as caught:
        load_user_pass(spec, folder, **options)
    assert {fault.where for fault in caught.value.faults} == {spec}
    return [fault.message for fault in caught.value.faults]


def test_only_names_with_a_colon_are_a_users():
    assert is_user_pass("mine:DoNothing")
    assert not any(is_user_pass(name) for name in PASSES)


def test_a_pass_beside_the_recipe_runs_like_ours(write, tiny_decoder):
    pass_type = load_user_pass("mine:DoNothing", write(GOOD))
    outcome = pass_type(pass_type.config_type(times=3))(Artifact.start(tiny_decoder(layers=1).checkpoint()))
    assert (outcome.report.name, outcome.report.config, outcome.report.metrics) == (
        "do_nothing",
        {"times": 3},
        {"times": 3},
    )


def test_a_module_in_a_folder_below_is_named_with_dots(write):
    assert load_user_pass("more.mine:DoNothing", write(GOOD, "more/mine.py")).name == "do_nothing"


def test_editing_the_file_makes_another_result(write, tiny_decoder):
    artifact = Artifact.start(tiny_decoder(layers=1).checkpoint())

    def key(folder):
        pass_type = load_user_pass("mine:DoNothing", folder)
        return pass_type(pass_type.config_type()).result_key(artifact)

    first = key(write(GOOD))
    assert key(write(GOOD)) == first
    assert key(write(GOOD + "\n# another thought\n")) != first
    assert key(write(GOOD)) == first


def test_two_classes_of_one_file_and_name_make_two_results(write, tiny_decoder):
    folder = write(
        GOOD + GOOD.replace("class DoNothing", "class DoLess").partition('"""How often to do nothing."""')[2]
    )
    artifact = Artifact.start(tiny_decoder(layers=1).checkpoint())
    passes = [load_user_pass(f"mine:{name}", folder) for name in ("DoNothing", "DoLess")]
    assert len({pass_type.name for pass_type in passes}) == 1
    assert len({pass_type(pass_type.config_type()).result_key(artifact) for pass_type in passes}) == 2


def test_an_installed_module_is_found_where_no_file_is(tmp_path):
    pass_type = load_user_pass("optimc_passes.quantize.rtn:Rtn", tmp_path)
    assert pass_type.name == "rtn"
    assert len(pass_type.source_digest) == 64
    assert PASSES["rtn"].source_digest is None, "what was imported stays as it was"


@pytest.mark.parametrize("spec", ["mine:", ":DoNothing", "a-b:C", "a:b:c", "../mine:DoNothing", "a..b:C"])
def test_what_is_no_module_and_class_is_refused(spec, tmp_path):
    assert faults(spec, tmp_path) == ["write it as module:Class, for example my_passes:DropThings"]


def test_a_module_that_is_nowhere_names_both_places(tmp_path):
    (message,) = faults("nowhere_at_all:X", tmp_path)
    assert str(tmp_path / "nowhere_at_all.py") in message
    assert "No module named 'nowhere_at_all'" in message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def f(:", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
    ],
)
def test_a_file_that_does_not_run_says_why(write, text, said):
    folder = write(text)
    for _ in range(2):  # nothing half imported is found the second time
        (message,) = faults("mine:X", folder)
        assert f"{folder / 'mine.py'} cannot be imported: {said}" in message


def test_the_line_is_named_where_the_folder_is_relative(write, monkeypatch):
    folder = write("x = 1\nx.y")
    monkeypatch.chdir(folder.parent)
    (message,) = faults("mine:X", Path(folder.name))
    assert message.endswith(f"({folder / 'mine.py'}, line 2)")


def test_a_class_that_is_not_there_lists_those_that_are(write):
    assert faults("mine:Nothing", write(GOOD)) == ["mine has no Nothing; its passes: DoNothing"]


def test_something_else_than_a_pass_is_refused(write):
    folder = write(GOOD)
    assert faults("mine:Options", folder) == ["Options is no subclass of optimc_passes.base.Pass"]


def test_the_name_of_a_pass_of_ours_is_taken(write):
    (message,) = faults("mine:DoNothing", write(GOOD.replace('"do_nothing"', '"rtn"')), taken=PASSES)
    assert message == "DoNothing name 'rtn' is that of a pass of ours; choose another"


def test_every_breach_of_the_contract_is_reported_at_once(write):
    folder = write(
        '''
        from optimc_passes.base import Pass, PassConfig


        class Options(PassConfig):
            times: int = 1


        class Bad(Pass[Options]):
            name, version, stage = "Bad Name", 0, "later"
            config_type = Options


        class Empty(Pass):
            """Says nothing."""
        '''
    )
    assert faults("mine:Bad", folder) == [
        "Bad does not fill in run",
        "Bad name is 'Bad Name', want lower-case letters, digits and underscores",
        "Bad version is 0, want a whole number from 1",
        "Bad stage is 'later', want 'weights', 'graph' or 'heads'",
        "Bad has no docstring; it is what `optimc recipe-schema` and readers see",
        "Bad option times is not described; put a docstring below it",
    ]
    assert faults("mine:Empty", folder) == [
        "Empty does not fill in run",
        "Empty name is None, want lower-case letters, digits and underscores",
        "Empty version is None, want a whole number from 1",
        "Empty stage is None, want 'weights', 'graph' or 'heads'",
        "Empty config_type is None, want a subclass of PassConfig",
    ]


def test_a_fusion_without_rules_is_refused(write):
    folder = write(
        '''
        from optimc_passes.fuse.rule import FusionPass, NoOptions


        class Empty(FusionPass[NoOptions]):
            """Rewrites nothing."""

            name, version, config_type, rules = "empty", 1, NoOptions, ()
        '''
    )
    assert faults("mine:Empty", folder) == ["Empty rules is (), want a tuple of at least one subclass of Rule"]


def test_rules_must_be_rules_that_are_complete(write):
    text = '''
        from optimc_passes.fuse.rule import FusionPass, NoOptions, Rule


        class Half(Rule):
            def pattern(self, op, x):
                return op.Relu(x)


        class Fuse(FusionPass[NoOptions]):
            """Rewrites."""

            name, version, config_type, rules = "mine", 1, NoOptions, (RULES,)
        '''
    assert faults("mine:Fuse", write(text.replace("RULES", "Half"))) == ["Fuse rule Half does not fill in rewrite"]
    assert faults("mine:Fuse", write(text.replace("RULES", "int"))) == [
        "Fuse rules is (<class 'int'>,), want a tuple of at least one subclass of Rule"
    ]


def test_options_must_be_frozen_and_refuse_unknown_keys(write):
    folder = write(GOOD.replace("(PassConfig):", "(PassConfig, frozen=False, extra='allow'):"))
    assert faults("mine:DoNothing", folder) == [
        "DoNothing config_type Options has frozen=False, want True",
        "DoNothing config_type Options has extra='allow', want 'forbid'",
    ]


@pytest.mark.parametrize("name", ["['a']", "3"])
def test_a_name_that_is_no_text_is_refused(write, name):
    (message,) = faults("mine:DoNothing", write(GOOD.replace('"do_nothing"', name)), taken={*PASSES})
    assert message == f"DoNothing name is {name}, want lower-case letters, digits and underscores"


def test_a_class_that_cannot_be_derived_from_is_refused(write):
    (message,) = faults("mine:DoNothing", write(GOOD + "\n    def __init_subclass__(cls):\n        1 / 0\n"))
    assert message.startswith("DoNothing cannot be derived from: ZeroDivisionError: division by zero (")


@pytest.mark.parametrize("name", list(PASSES))
def test_our_own_passes_keep_the_contract(name):
    assert contract_faults(PASSES[name]) == []
