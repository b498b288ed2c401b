"""`optimc compare` looks at all it is given before it builds any of it; what has no bound is compared all the same."""

import pytest

from optimc.build import BuildOptions
from optimc.cli.compare import bound_for, check_items, read_attribution
from optimc.errors import ConfigError
from optimc.measure.store import PlanSubject
from optimc.plan import TargetInfo


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "model").mkdir(exist_ok=True)

    def write(file, name, extra=""):
        path = tmp_path / file
        path.write_text(f"name: {name}\nmodel: {tmp_path / 'model'}\n{extra}")
        return path

    return write


@pytest.fixture
def faults(tmp_path):
    def check(*items):
        with pytest.raises(ConfigError) as caught:
            check_items(items, BuildOptions(output_dir=tmp_path / "plans", cache_dir=tmp_path / "cache"))
        return [str(fault) for fault in caught.value.faults]

    return check


def test_recipes_are_known_by_name_and_may_be_given_twice(recipe, tmp_path):
    first, second = recipe("a.yaml", "one"), recipe("b.yml", "two")
    assert check_items([first, second, first], BuildOptions(cache_dir=tmp_path / "cache")) == {
        first: "one",
        second: "two",
    }


def test_every_recipe_and_plan_is_looked_at_before_any_is_built(faults, recipe, tmp_path):
    broken = recipe("broken.yaml", "broken", "passes: [nope]\ncolour: blue\n")
    absent, no_plan = tmp_path / "absent.plan", tmp_path / "text.plan"
    no_plan.write_text("this is no plan")
    found = faults(recipe("good.yaml", "good"), broken, absent, no_plan)
    assert len(found) == 4
    assert found[0].startswith(f"line 3: {broken}: passes[0].nope: unknown pass")
    assert found[1].startswith(f"line 4: {broken}: colour: unknown key")
    assert str(absent) in found[2]
    assert str(no_plan) in found[3]


def test_two_recipes_of_one_name_would_make_one_plan(faults, recipe, tmp_path):
    first, second = recipe("a.yaml", "same"), recipe("b.yaml", "same")
    assert faults(first, second) == [f"{second}: has the name of {first}; both would be {tmp_path}/plans/same.plan"]


def test_a_name_given_to_all_recipes_is_such_a_mistake(recipe, tmp_path):
    options = BuildOptions(overrides=("name=x",), cache_dir=tmp_path / "cache")
    with pytest.raises(ConfigError, match="has the name of"):
        check_items([recipe("a.yaml", "one"), recipe("b.yaml", "two")], options)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "No such file"),
        ("{}", "is not what `optimc attribute --json` prints"),
        ("[1]", "is not what"),
        (
            '{"format": 1, "recipe": "r", "base": {}, "rows": [], "machine": {}, "method": [], "interaction": {"x": '
            '{"value": NaN, "low": null, "high": null, "pairs": 1}}}',
            "a number above 0, got nan",
        ),
    ],
)
def test_an_attribution_that_is_none_is_refused(tmp_path, text, said):
    path = tmp_path / "attribution.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=f"--attribution: .*{said}"):
        read_attribution(path)


def test_a_target_whose_work_nobody_can_count_has_no_bound(plan):
    subject = PlanSubject.open(plan("gpu.plan", target=TargetInfo(backend="tensorrt")))
    assert bound_for(object())(subject) is None
