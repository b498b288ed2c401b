"""Every rule fires the expected number of times on every architecture, and the fused graph is the unfused one.

The table is the contract: a rule that misses a site, or finds one where none is, shows here before it shows in speed.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import onnx_ir as ir
import pytest

from optimc.plan import FusionReport
from optimc_passes.artifact import Artifact
from optimc_passes.checkpoint import Checkpoint
from optimc_passes.dialect import verify_graph
from optimc_passes.fuse.pipeline import GRAPH_PASSES
from optimc_passes.fuse.rule import NoOptions
from optimc_passes.verify.evaluate import evaluate
from optimc_passes.verify.probe import Probe
from optimc_passes.verify.session import WeightPool, run_probe

TOLERANCE = 1e-5
"""Largest difference of two logits over the largest of their row. All is float32, and most fusions change no bit."""


@dataclass(frozen=True)
class Expected:
    """Sites rewritten, by rule; those not named fire nowhere."""

    layers: int
    nodes: int
    """Of the fused graph."""
    fires: dict[str, int]
    already: dict[str, int]
    """Sites that had the wanted form before."""
    declined: dict[str, int]


def _expected(
    layers: int,
    nodes: int,
    *,
    gate: str = "swiglu",
    already: dict[str, int] | None = None,
    declined: dict[str, int] | None = None,
    **changed: int,
) -> Expected:
    """Return what a decoder with norms before its sublayers shows, but for what is changed."""
    fires = {
        "merge_qkv": layers,
        "merge_gate_up": layers,
        gate: layers,
        "gather_rows_early": 1,
        "drop_batch_axis": 1,
        "rotary_qkv": layers,
        # The first norm of the model has no sum before it, the final norm has.
        "add_rms_norm": 2 * layers,
    }
    fires.update(changed)
    rotated = fires["rotary_qkv"]
    # Query and key of each layer read tables that the exporter's clean-up has shared already.
    return Expected(
        layers,
        nodes,
        {name: count for name, count in fires.items() if count},
        {"share_rotary_tables": 2 * rotated, **(already or {})},
        declined or {},
    )


# fmt: off
EXPECTED = {
    "llama": _expected(3, 38),
    "llama-rope-linear": _expected(2, 36),
    "llama-rope-llama3": _expected(1, 19),
    "llama-rope-yarn": _expected(1, 21),
    "qwen2": _expected(2, 31),
    "qwen3": _expected(2, 28, qk_norm=2),
    "mistral": _expected(2, 28),
    # 1 + weight of each norm; the embedding's factor, and the division before the soft cap. Behind it is a factor, too.
    "gemma2": _expected(2, 35, gate="geglu", fold_constants=9, fold_scale_into_weights=2,
                        declined={"fold_scale_into_weights": 1}),
    "gemma3": _expected(3, 47, gate="geglu", qk_norm=3, fold_constants=19, fold_scale_into_weights=1),
    # One layer gives query, key and value, one gate and up.
    "phi3": _expected(2, 28, merge_qkv=0, merge_gate_up=0, already={"merge_qkv": 2}),
    "phi3-rope-longrope": _expected(1, 21, merge_qkv=0, merge_gate_up=0, already={"merge_qkv": 1}),
    # The second of its layers is not rotated.
    "smollm3": _expected(3, 38, rotary_qkv=2, already={"rotary_qkv": 1}),
    # Norms stand behind sublayers, before the sum.
    "olmo2": _expected(2, 31, qk_norm=2, add_rms_norm=1),
    # Two residual factors a layer, those of embedding and logits.
    "granite": _expected(2, 32, fold_scale_into_weights=6),
}
# fmt: on


@dataclass(frozen=True)
class Fused:
    """A family on its way through all passes."""

    before: ir.Model
    steps: dict[str, ir.Model]
    """The graph after each pass, in order."""
    reports: dict[str, FusionReport]

    @property
    def after(self) -> ir.Model:
        return list(self.steps.values())[-1]


def _architectures() -> Any:
    """Import the test of architectures: pytest imports test files apart from each other."""
    path = Path(__file__).with_name("test_architectures.py")
    spec = importlib.util.spec_from_file_location("fusion_counts_architectures", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


ARCHITECTURES = _architectures()


PROBE = Probe.of_vocabulary(ARCHITECTURES.VOCAB, 100).with_scattered_rows()
"""Long enough that windows of 24 and 40 tokens hide something; rows are not where their tokens are."""


@pytest.fixture(scope="module")
def fuse() -> Callable[[str], Fused]:
    """Export a family and run all graph passes, once a module."""
    return functools.cache(_fuse)


def _fuse(name: str) -> Fused:
    case = ARCHITECTURES._make_case(name)
    checkpoint = cast(Checkpoint, SimpleNamespace(weights=case.store))
    artifact = Artifact("0" * 64, checkpoint, case.store, graph=case.attached)
    before = artifact.graph
    assert before is not None
    steps, reports = {}, {}
    for pass_type in GRAPH_PASSES:
        outcome = pass_type(NoOptions())(artifact)
        artifact = outcome.artifact
        assert artifact.graph is not None
        assert verify_graph(artifact.graph) == [], pass_type.name
        steps[pass_type.name] = artifact.graph
        assert outcome.report.fusion is not None
        reports[pass_type.name] = outcome.report.fusion
    return Fused(before, steps, reports)


def test_every_supported_architecture_has_a_row():
    assert EXPECTED.keys() == ARCHITECTURES.FAMILIES.keys()


@pytest.mark.parametrize("name", EXPECTED)
def test_every_rule_fires_as_often_as_it_should(name: str, fuse: Callable[[str], Fused]):
    reports, expected = fuse(name).reports, EXPECTED[name]
    assert {rule: report.matched for rule, report in reports.items() if report.matched} == expected.fires
    assert {rule: report.already for rule, report in reports.items() if report.already} == expected.already
    declined = {rule: sum(entry.sites for entry in report.declined) for rule, report in reports.items()}
    assert {rule: count for rule, count in declined.items() if count} == expected.declined


@pytest.mark.parametrize("name", EXPECTED)
def test_the_fused_graph_equals_the_unfused_one(name: str, fuse: Callable[[str], Fused]):
    fused = fuse(name)
    before, after = evaluate(fused.before, PROBE), evaluate(fused.after, PROBE)
    error = np.abs(after - before) / np.abs(before).max(axis=1, keepdims=True)
    assert error.max() < TOLERANCE


@pytest.mark.parametrize("name", EXPECTED)
def test_values_of_one_name_mean_the_same_after_every_pass(name: str, fuse: Callable[[str], Fused]):
    """The search for a wrong node compares values by name, where their shapes agree but for axes of length 1."""
    fused, pool = fuse(name), WeightPool()
    probe = Probe.of_vocabulary(ARCHITECTURES.VOCAB, 30).with_scattered_rows()
    before, compared = fused.before, 0
    for pass_name, after in fused.steps.items():
        old, new = _shapes(before), _shapes(after)
        common = [value for value, shape in new.items() if old.get(value) == shape]
        values = [run_probe(model, probe, common, pool) for model in (before, after)]
        for value in common:
            error = np.abs(values[1][value].reshape(-1) - values[0][value].reshape(-1)).max()
            assert error <= TOLERANCE * max(np.abs(values[0][value]).max(), 1), f"{pass_name}: {value}"
        before, compared = after, compared + len(common)
    assert compared > 100


def _shapes(model: ir.Model) -> dict[str, list[str]]:
    """Return the shape of each float value that a node computes, without axes of length 1."""
    return {
        value.name or "": [str(dim) for dim in value.shape if dim != 1]
        for node in model.graph
        for value in node.outputs
        if value.shape is not None and value.dtype == ir.DataType.FLOAT
    }


@pytest.mark.parametrize("name", EXPECTED)
def test_no_more_nodes_are_left_than_the_table_says(name: str, fuse: Callable[[str], Fused]):
    assert len(fuse(name).after.graph) == EXPECTED[name].nodes


def test_a_layer_is_nine_nodes(fuse: Callable[[str], Fused]):
    """The norm before a layer's attention is joined with the sum of the layer before it."""
    graph = fuse("llama").after.graph
    *nodes, gather = [node.op_type for node in graph if (node.name or "").startswith("model.layers.1")]
    assert nodes == [
        "MatMul",
        "RotaryQkv",
        "PagedAttention",
        "MatMul",
        "AddRmsNorm",
        "MatMul",
        "GatedActivation",
        "MatMul",
        "AddRmsNorm",
    ]
    assert gather == "Gather", "the last layer after it needs the sum of the asked rows only"


@pytest.mark.parametrize("left_out", [pass_type.name for pass_type in GRAPH_PASSES])
def test_any_pass_may_be_left_out(left_out: str, fuse: Callable[[str], Fused]):
    graph = fuse("gemma3").before
    before = evaluate(graph, PROBE)
    artifact = Artifact("0" * 64, cast(Checkpoint, SimpleNamespace(weights={})), cast(Any, {}), graph=graph)
    for pass_type in GRAPH_PASSES:
        if pass_type.name != left_out:
            artifact = pass_type(NoOptions())(artifact).artifact
    assert artifact.graph is not None
    assert verify_graph(artifact.graph) == []
    error = np.abs(evaluate(artifact.graph, PROBE) - before) / np.abs(before).max(axis=1, keepdims=True)
    assert error.max() < TOLERANCE


def test_a_second_time_no_rule_fires(fuse: Callable[[str], Fused]):
    graph = fuse("qwen3").after
    artifact = Artifact("0" * 64, cast(Checkpoint, SimpleNamespace(weights={})), cast(Any, {}), graph=graph)
    for pass_type in GRAPH_PASSES:
        outcome = pass_type(NoOptions())(artifact)
        assert outcome.report.metrics["matched"] == 0, pass_type.name
