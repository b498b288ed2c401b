"""The worked example of passes/README.md: sixty lines at most, a pass like any other, and its tests pass."""

import re
from pathlib import Path
from types import ModuleType

import pytest

from optimc_passes.fuse.pipeline import GRAPH_PASSES
from optimc_passes.quantize.config import LayerChoice
from optimc_passes.registry import PASSES
from optimc_passes.user_pass import load_user_pass

README = Path(__file__).parents[3] / "passes/README.md"
FUSION, TESTS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.fixture
def example(tmp_path):
    (tmp_path / "reglu.py").write_text(FUSION)
    return load_user_pass("reglu:Reglu", tmp_path, taken=[pass_type.name for pass_type in GRAPH_PASSES])


def test_it_is_sixty_lines_at_most():
    assert len(FUSION.splitlines()) <= 60


def test_its_own_tests_pass(apply_rule):
    module = ModuleType("reglu_example")
    exec(compile(FUSION + TESTS, str(README), "exec"), vars(module))
    tests = [entry for name, entry in vars(module).items() if name.startswith("test_")]
    assert len(tests) == 2
    for test in tests:
        test(apply_rule)


def test_a_recipe_can_name_it_and_it_reports_like_ours(example, tiny_decoder, fused):
    result = fused(example(example.config_type()), tiny_decoder())
    assert result.metrics == {"matched": 0, "declined": 0}
    assert result.outcome.report.fusion is not None


def test_every_graph_pass_is_in_the_readme_in_order():
    table = README.read_text().partition("## Graph passes")[2].partition("## Write a fusion")[0]
    named = re.findall(r"`(\w+)`", "\n".join(re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE)))
    assert named == [pass_type.name for pass_type in GRAPH_PASSES]


def test_every_weight_pass_is_in_the_readme_with_its_options():
    text = README.read_text().partition("## Weight passes")[2].partition("## Graph passes")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \| ", text, re.MULTILINE))
    weight_passes = {pass_type.name: pass_type for pass_type in PASSES.values() if pass_type.stage == "weights"}
    assert set(rows) == set(weight_passes)
    for name, pass_type in weight_passes.items():
        # Options that several passes share are described above the table.
        own = set(pass_type.config_type.model_fields) - set(LayerChoice.model_fields)
        assert own <= set(re.findall(r"\w+", rows[name])), name
