"""Options that several commands have mean the same in each, and faults name them as they were given."""

from typing import get_type_hints

import pytest

from optimc.cli import options
from optimc.cli.attribute import attribute
from optimc.cli.bench import bench
from optimc.cli.compare import compare
from optimc.cli.evaluate import evaluate
from optimc.cli.search import search
from optimc.errors import ConfigError, Fault

COMMANDS = {"bench": bench, "compare": compare, "attribute": attribute, "search": search, "eval": evaluate}
RECIPE = """
name: tiny
model: somewhere/tiny
passes: [{rtn: {bits: 4, group_size: 32}}]
limits: {max_seq_len: 2048}
"""


@pytest.mark.parametrize(
    ("option", "commands"),
    [
        ("slo", ("bench", "compare", "attribute", "search")),
        ("attain", ("bench", "compare", "attribute", "search")),
        ("prompt_tokens", ("bench", "compare", "attribute", "search")),
        ("output_tokens", ("bench", "compare", "attribute", "search")),
        ("length", ("compare", "attribute", "search", "eval")),
        ("windows", ("compare", "search", "eval")),
        ("concurrency", ("bench", "search")),
        ("concurrency", ("compare", "attribute")),
    ],
)
def test_an_option_is_declared_once_for_all_commands(option, commands):
    declared = [get_type_hints(COMMANDS[command], include_extras=True)[option] for command in commands]
    assert all(each == declared[0] for each in declared)


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("attribute RECIPE --pairs 2 --concurrency 8,1 --requests 0", {"--pairs", "--concurrency", "--requests"}),
        ("attribute RECIPE --concurrency one", {"--concurrency"}),
        ("attribute RECIPE --budget-minutes -1", {"--budget-minutes"}),
        ("attribute RECIPE --speculation magic", {"--speculation"}),
        ("attribute RECIPE --knee", {"--knee"}),
        ("compare a.plan --concurrency 8,1 --repeats 0", {"--concurrency", "--repeats"}),
        ("compare a.plan --prompt-tokens 0", {"--prompt-tokens"}),
        ("compare a.plan --ladder --slo ttft=5 --rates 2,1", {"--rates"}),
        ("search RECIPE --concurrency 4 --requests 2", {"--requests"}),
        ("search RECIPE --prompt-tokens 0", {"--prompt-tokens"}),
        ("search RECIPE --objective cost --machine-price -2", {"--machine-price"}),
    ],
)
def test_faults_are_named_by_their_options(words, names, tmp_path, refused):
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(RECIPE)
    assert set(refused(*words.replace("RECIPE", str(recipe)).split())) == names


def test_numbers_are_told_as_they_were_given(tmp_path, refused):
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(RECIPE)
    assert refused("attribute", recipe, "--budget-minutes", -2) == {
        "--budget-minutes": "must be above 0 minutes, got -2"
    }


@pytest.mark.parametrize("command", ["compare a.plan --ladder", "bench a.plan --ladder", "attribute r.yaml --knee"])
def test_a_share_is_a_share_in_every_command(command, refused):
    for share in ("0", "1.5", "nan"):
        faults = refused(*command.split(), "--slo", "ttft=5", "--attain", share)
        assert faults == {"--attain": f"must be a share above 0 and at most 1, got {share}"}


def test_lists_of_numbers():
    assert options.numbers_option("1, 8,", int, "--concurrency", "1,8") == (1, 8)
    with pytest.raises(ConfigError, match="--concurrency: must be numbers with commas, as in 1,8, got '1;8'"):
        options.numbers_option("1;8", int, "--concurrency", "1,8")


def test_fields_become_options_and_options_stay():
    with pytest.raises(ConfigError) as caught, options.faults_by_option(rate_per_s="--rate"):
        raise ConfigError("x", [Fault(where, "") for where in ("rate_per_s", "max_seqs", "--slo", "")])
    assert [fault.where for fault in caught.value.faults] == ["--rate", "--max-seqs", "--slo", ""]
