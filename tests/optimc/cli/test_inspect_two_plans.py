"""`optimc inspect A B`: what sets two plans apart."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from optimc.cli.app import app
from optimc.plan import Limits

from .conftest import GATE, GRAPH, MERGE, PASSES, report


@pytest.fixture
def lines(plan):
    """The lines for the plain plan beside one that differs in some fields."""

    def run(**changes):
        paths = plan("left.plan"), plan("right.plan", **changes)
        result = CliRunner().invoke(app, ["inspect", *map(str, paths)])
        assert result.exit_code == 0, result.output
        return result.output.splitlines()

    return run


def test_plans_of_the_same_making_differ_in_nothing(lines):
    assert lines() == ["no difference in settings, passes, fusions or tensors"]


def test_seconds_and_the_cache_are_no_difference(lines):
    passes = tuple(entry.model_copy(update={"seconds": 9.0, "cached": True, "peak_bytes": 7}) for entry in PASSES)
    graph = GRAPH.model_copy(update={"graph_seconds": 99.0})
    assert len(lines(passes=passes, graph=graph)) == 1


def test_a_dropped_pass_shows_with_its_counts(lines):
    graph = GRAPH.model_copy(update={"fused_nodes": 9})
    assert lines(passes=PASSES[:2], graph=graph) == [
        "passes",
        "  - swiglu  version: 1",
        "fusions",
        "  fused_nodes: 5 → 9",
        "  swiglu.matched: 2 → none",
        "  swiglu.operators.MatMul: 3 → none",
        "  swiglu.operators.GatedActivation: 2 → none",
        "  swiglu.activation_bytes: 1024 → none",
    ]


def test_other_options_and_counts_show_beside_each_other(lines):
    other = MERGE.model_copy(update={"matched": 5, "declined": ()})
    passes = (report("rtn", bits=8), report("merge_qkv", other), report("swiglu", GATE), report("rtn", bits=3))
    assert lines(passes=passes) == [
        "passes",
        "  rtn  bits: 4 → 8",
        "  + rtn (2)  version: 1, bits: 3",
        "fusions",
        "  merge_qkv.matched: 2 → 5",
        "  merge_qkv.declined.bits differ: 4 and 8: 3 → none",
    ]


def test_limits_and_weights_are_named(lines):
    limits = Limits(max_seq_len=8, max_step_tokens=8, max_seqs=4, kv_memory_bytes=1)
    schemes = {f"layer.{index}": {"bits": 4, "method": "rtn"} for index in range(3)}
    assert lines(limits=limits, quantization=schemes) == [
        "settings",
        "  limits.max_seqs: 1 → 4",
        "quantized weights",
        "  bits none → 4: layer.0 and 2 more",
        "  method none → rtn: layer.0 and 2 more",
    ]


def test_tensors_are_added_removed_or_other(lines):
    found = lines(arrays={"a": np.ones(4, np.float32), "b": np.zeros((2, 3), np.int8)})
    assert found == ["tensors", "  a  F32 [4] 16 B, other contents", "  + b  I8 [2, 3] 6 B"]
    assert lines(arrays={"a": np.zeros(2, np.float32)})[1:] == ["  a  F32 [4] 16 B → F32 [2] 8 B"]


def test_many_tensors_are_counted(lines):
    found = lines(arrays={f"t{index:02d}": np.zeros(1, np.int8) for index in range(30)})
    assert len(found) == 22
    assert found[-1] == "  … 11 more (--json)"


def test_json_holds_all_of_it(plan):
    paths = plan("left.plan"), plan("right.plan", passes=PASSES[1:])
    result = CliRunner().invoke(app, ["inspect", *map(str, paths), "--json"])
    facts = json.loads(result.output)
    assert facts["passes"] == {"rtn": {"left": {"version": 1, "bits": 4}, "right": None}}
    assert facts["settings"] == facts["tensors"] == {}


def test_options_for_one_plan_are_refused_with_two(plan):
    path = str(plan("left.plan"))
    for option in (["--fusions"], ["--why", "x"], ["--tensors"], ["--program"], ["--layers"]):
        result = CliRunner().invoke(app, ["inspect", path, path, *option])
        assert result.exit_code == 2
        assert "show one plan" in result.output
