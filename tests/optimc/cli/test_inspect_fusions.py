"""`optimc inspect PLAN --fusions` and `--why RULE`."""

import json

import pytest
from typer.testing import CliRunner

from optimc.cli.app import app
from optimc.cli.fusion_listing import explain
from optimc.errors import PlanError, UnknownNameError
from optimc.plan import Plan

from .conftest import GATE, GRAPH, MERGE, report


@pytest.fixture
def shown(plan):
    """The words of a command on a plan, as they stand on a wide screen."""

    def run(*args, path=None):
        result = CliRunner().invoke(app, ["inspect", str(path or plan("a.plan")), *args], env={"COLUMNS": "300"})
        assert result.exit_code == 0, result.output
        return result.output

    return run


def entry_of(text, rule):
    """The figures of a rule, and the lines below."""
    lines = text.splitlines()
    (start,) = (index for index, line in enumerate(lines) if line.startswith(f"{rule} "))
    words = []
    for line in lines[start + 1 :]:
        if not line.startswith("    "):
            break
        words.append(line.strip())
    return lines[start].split(), words


def test_a_rule_says_matched_declined_bytes_and_error_and_in_words_operators_and_reasons(shown):
    text = shown("--fusions")
    assert text.splitlines()[0].split() == ["rule", "at", "matched", "declined", "saved", "a", "token", "error"]
    assert entry_of(text, "merge_qkv") == (
        ["merge_qkv", "graph", "2", "3", "1.0", "KiB", "1.5e-07"],
        ["MatMul 7 → 3, Split 0 → 2", "done before at 1", "declined at 3, first at layer 2: bits differ: 4 and 8"],
    )


def test_a_rule_that_never_fired_says_what_came_closest(plan, shown):
    alone = MERGE.model_copy(update={"matched": 0, "declined": ()})
    text = shown("--fusions", path=plan("none.plan", passes=(report("merge_qkv", alone),)))
    assert entry_of(text, "merge_qkv")[1][-1] == "nearest miss: MatMul layers.2/MatMul: bits differ: 4 and 8"


def test_lines_fit_a_terminal(shown):
    assert max(len(line) for line in shown("--fusions").splitlines() if "→" not in line) <= 80


def test_the_rewrites_of_the_frontend_come_first(shown):
    text = shown("--fusions")
    assert entry_of(text, "rotary")[0][1:3] == ["export", "60"]
    assert text.index("partial_rotary") < text.index("merge_qkv") < text.index("swiglu")
    assert "rtn" not in text, "a weight pass rewrites no graph"


def test_the_whole_graph_is_summed_up(shown):
    lines = shown("--fusions").splitlines()[-4:]
    assert lines == [
        "nodes: 4,454 exported, 852 cleaned, 11 with weights, 5 fused",
        "operators: MatMul 7 → 3, GatedActivation 0 → 2, Add 2 → 0",
        "activations moved for a token: 4.0 KiB → 1.0 KiB",
        "seconds: 38.2 for the export, 1.5 for the graph passes",
    ]


def test_why_prints_the_nearest_miss_with_its_surroundings(shown):
    assert shown("--why", "merge_qkv").splitlines() == [
        "merge_qkv (graph): 2 matched, 3 declined, 1 done before",
        "  declined at 3, first at layer 2: bits differ: 4 and 8",
        "  nearest miss: MatMul 'layers.2/MatMul', 4 nodes of the pattern there: bits differ: 4 and 8",
        "       x = Add(a, b) : [T,64]",
        "    -> q = MatMul(x, w) : [T,64]",
    ]


def test_why_of_a_rule_that_missed_nothing_says_so(shown):
    assert shown("--why", "swiglu").splitlines() == ["swiglu (graph): 2 matched, 0 declined", "  no near miss"]
    assert shown("--why", "partial_rotary").splitlines()[1] == "  no near miss: the pattern does not occur"


def test_why_of_an_unknown_rule_lists_the_known(plan):
    with (
        Plan.open(plan("a.plan")) as opened,
        pytest.raises(UnknownNameError, match="'merge'; known: merge_qkv, partial_rotary, rotary, swiglu"),
    ):
        list(explain(opened, "merge"))


def test_a_rule_that_ran_twice_is_explained_twice(plan, shown):
    path = plan("twice.plan", passes=(report("swiglu", GATE), report("swiglu", GATE.model_copy(update={"matched": 0}))))
    lines = shown("--why", "swiglu", path=path).splitlines()
    assert [line for line in lines if line.startswith("swiglu")] == [
        "swiglu (graph): 2 matched, 0 declined",
        "swiglu (graph): 0 matched, 0 declined",
    ]


def test_json_holds_all_of_it(shown):
    facts = json.loads(shown("--fusions", "--json"))
    assert facts["graph"]["exported_nodes"] == 4454
    assert [entry["rule"] for entry in facts["rules"]] == ["rotary", "partial_rotary", "merge_qkv", "swiglu"]
    assert facts["rules"][2] == {"rule": "merge_qkv", "stage": "graph", **MERGE.model_dump(mode="json")}
    one = json.loads(shown("--why", "merge_qkv", "--json"))
    assert [entry["rule"] for entry in one["rules"]] == ["merge_qkv"]
    assert "nearest miss" in one["explanation"][2]


def test_a_plan_without_the_record_says_so(plan):
    path = plan("old.plan", passes=(report("rtn", bits=4),), graph=None)
    with (
        Plan.open(path) as opened,
        pytest.raises(PlanError, match=r"old\.plan: built before rewrites"),
    ):
        list(explain(opened, "merge_qkv"))
    shown = CliRunner().invoke(app, ["inspect", str(path)])
    assert "not recorded" in shown.output


def test_the_summary_counts_nodes(shown):
    assert "4,454 nodes exported, 5 left" in shown()


def test_a_plan_without_any_rewrite_has_an_empty_table(plan, shown):
    path = plan("bare.plan", passes=(), graph=GRAPH.model_copy(update={"frontend": {}}))
    text = shown("--fusions", path=path)
    assert text.splitlines()[0].startswith("rule  at")
    assert "nodes: 4,454 exported" in text
