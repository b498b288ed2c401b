"""Small plans whose passes report what they did to a graph, and what a command line is refused for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from optimc.cli.app import app
from optimc.errors import ConfigError
from optimc.plan import (
    FORMAT_VERSION,
    DeclinedSites,
    FusionReport,
    GraphReport,
    KvLayer,
    KvLayout,
    Limits,
    Manifest,
    ModelInfo,
    NearestMiss,
    PassReport,
    PlanTensor,
    Source,
    TargetInfo,
    TokenIds,
    write_plan,
)

MERGE = FusionReport(
    matched=2,
    already=1,
    declined=(DeclinedSites(reason="bits differ: 4 and 8", sites=3, first="layer 2"),),
    nearest=NearestMiss(
        node="layers.2/MatMul",
        op="MatMul",
        reason="bits differ: 4 and 8",
        matched_nodes=4,
        surroundings=("   x = Add(a, b) : [T,64]", "-> q = MatMul(x, w) : [T,64]"),
    ),
    ops_before={"MatMul": 7, "Add": 2},
    ops_after={"MatMul": 3, "Add": 2, "Split": 2},
    traffic_before_bytes=4096,
    traffic_after_bytes=3072,
    relative_error=1.5e-7,
)
GATE = FusionReport(
    matched=2,
    ops_before=MERGE.ops_after,
    ops_after={"MatMul": 3, "GatedActivation": 2},
    traffic_before_bytes=3072,
    traffic_after_bytes=1024,
    relative_error=0.0,
)
GRAPH = GraphReport(
    exported_nodes=4454,
    cleaned_nodes=852,
    attached_nodes=11,
    fused_nodes=5,
    export_seconds=38.2,
    graph_seconds=1.5,
    frontend={"rotary": FusionReport(matched=60), "partial_rotary": FusionReport()},
)


def report(name: str, fusion: FusionReport | None = None, **config: Any) -> PassReport:
    """Return a pass's report."""
    return PassReport(name=name, version=1, config=config, seconds=0.5, peak_bytes=1, fusion=fusion)


PASSES = (report("rtn", bits=4), report("merge_qkv", MERGE), report("swiglu", GATE))


@pytest.fixture
def plan(tmp_path: Path) -> Callable[..., Path]:
    """Write a plan; keyword arguments replace fields of the manifest, `arrays` the tensors."""

    def write(file: str, arrays: dict[str, Any] | None = None, **changes: Any) -> Path:
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            name="small",
            target=TargetInfo(backend="cpu"),
            model=ModelInfo(architecture="Small", vocab_size=100, hidden_size=64, num_layers=1),
            limits=Limits(max_seq_len=8, max_step_tokens=8, max_seqs=1, kv_memory_bytes=1),
            kv=KvLayout(block_size=4, dtype="float32", layers=(KvLayer(num_kv_heads=2, head_dim=16, window=0),)),
            tokens=TokenIds(bos=None, eos=(), pad=None),
            passes=PASSES,
            graph=GRAPH,
            source=Source(
                model="m", model_hash="0", recipe={}, recipe_hash="0", calibration_hash=None, build_key="0", tools={}
            ),
        ).model_copy(update=changes)
        arrays = {"a": np.zeros(4, np.float32)} if arrays is None else arrays
        path = tmp_path / file
        write_plan(path, manifest, [PlanTensor.from_array(name, array) for name, array in arrays.items()])
        return path

    return write


@pytest.fixture
def refused() -> Callable[..., dict[str, str]]:
    """Run a command line that must be refused; return where each fault is, and its message."""

    def run(*words: object) -> dict[str, str]:
        error = CliRunner().invoke(app, [str(word) for word in words]).exception
        assert isinstance(error, ConfigError), error
        return {fault.where: fault.message for fault in error.faults}

    return run
