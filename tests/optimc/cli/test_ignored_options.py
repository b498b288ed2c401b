"""Options of the measuring commands that would change nothing are refused before anything is built or measured."""

import pytest

RECIPE = """
name: tiny
model: somewhere/tiny
passes: [{rtn: {bits: 4, group_size: 32}}]
limits: {max_seq_len: 256}
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(RECIPE)
    return path


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["compare", "a.plan", "--attain", "0.5", "--currency", "EUR"], {"--attain", "--currency"}),
        (["compare", "a.plan", "--build-jobs", "2", "--set", "a=1", "--output-dir", "x"],
         {"--build-jobs", "--set", "--output-dir"}),
        (["compare", "a.plan", "--json", "--markdown"], {"--markdown"}),
        (["attribute", "r.yaml", "--slo", "ttft=5", "--attain", "0.9"], {"--slo", "--attain"}),
        (["attribute", "r.yaml", "--windows", "0", "--length", "64"], {"--length"}),
        (["roofline", "a.plan", "--gpu", "H100", "--cache-dir", "x"], {"--cache-dir"}),
        (["roofline", "a.plan", "--gpu", "H100", "--check", "--fresh"], {"--check", "--fresh"}),
        (["roofline", "a.plan", "--batch", "1" + "0" * 30], {"--batch"}),
        (["roofline", "a.plan", "--batch", "0", "--context", "x"], {"--batch", "--context"}),
        (["roofline", "a.plan", "--batch", ","], {"--batch"}),
    ],
)  # fmt: skip
def test_what_would_change_nothing_is_refused(words, names, refused):
    assert set(refused(*words)) == names


def test_a_search_refuses_what_its_objective_does_not_use(recipe, refused):
    short = ("--prompt-tokens", 16, "--length", 64)
    assert set(refused("search", recipe, *short, "--slo", "ttft=5", "--machine-price", 1)) == {
        "--slo",
        "--machine-price",
    }
    assert set(refused("search", recipe, *short, "--budget-minutes", "nan")) == {"--budget-minutes"}


def test_a_search_refuses_loads_that_no_point_could_take_before_it_builds(recipe, refused):
    faults = refused("search", recipe, "--prompt-tokens", 200, "--output-tokens", 100, "--length", 512)
    assert faults == {
        "--length": "512 tokens per window, the recipe's limits.max_seq_len is 256",
        "--prompt-tokens": "300 tokens with their answer, the recipe's limits.max_seq_len is 256",
    }
