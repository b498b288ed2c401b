"""Graphs for TensorRT: made, run by ONNX Runtime, and built by TensorRT-RTX."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from optimc.plan import KvDtype
from optimc_passes.dialect import decompose_causal
from optimc_passes.emit.kv_layout import kv_layout
from optimc_passes.emit.tensorrt import gathered_attention
from optimc_passes.emit.tensorrt import network_graph as network_graph_file
from optimc_passes.emit.tensorrt.network_graph import network_graph
from optimc_passes.fuse.apply_rules import apply_rules
from optimc_passes.fuse.pipeline import GRAPH_PASSES
from optimc_passes.fuse.recorder import Recorder
from optimc_passes.fuse.rule import FusionPass

TESTS = Path(__file__).parents[3]


def _load(path: Path) -> ModuleType:
    """Import a file of the tests: pytest imports test files apart from each other."""
    name = f"tensorrt_tests_{path.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


ARCHITECTURES = _load(TESTS / "e2e/test_architectures.py")
DECOMPOSE = _load(TESTS / "passes/dialect/test_decompose.py")
ATTENTION = _load(TESTS / "passes/dialect/conftest.py")
SERVED = _load(Path(__file__).with_name("served.py"))
RTX = _load(Path(__file__).with_name("rtx.py"))


@pytest.fixture(scope="session")
def make_case() -> Callable[[str], Any]:
    """A family of tests/e2e/test_architectures.py by its name, exported once a session."""
    return functools.cache(ARCHITECTURES._make_case)


@pytest.fixture(scope="session", params=list(ARCHITECTURES.FAMILIES))
def case(request: pytest.FixtureRequest, make_case: Callable[[str], Any]) -> Any:
    """Each family in turn."""
    return make_case(request.param)


@pytest.fixture(scope="session")
def attention_graph() -> Callable[..., ir.Model]:
    """Graphs of attention alone, one node per spec: layer i reads q_i, k_i, v_i and writes out_i."""
    return ATTENTION._attention_graph


@pytest.fixture(scope="session")
def heads_tests() -> ModuleType:
    """The tests of heads on other targets: `make_heads`, `VARIANTS`."""
    return _load(TESTS / "passes/emit/test_heads.py")


@pytest.fixture(scope="session")
def batch() -> Callable[..., Any]:
    """Sequences in any phase, with context in a shuffled pool: `batch(spec, [(context, tokens), ...], block_size)`."""
    return DECOMPOSE.Batch


@pytest.fixture
def in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let "float16" mean float32: what a graph says is then seen apart from what half precision rounds."""
    monkeypatch.setitem(network_graph_file.HALF_TYPES, "float16", ir.DataType.FLOAT)
    monkeypatch.setitem(gathered_attention.POOL_TYPES, "float16", ir.DataType.FLOAT)


@pytest.fixture(scope="session")
def serve() -> Callable[..., Any]:
    """Make the graph of a dialect graph and serve it: `serve(model, precision="float16", kv="float16")`."""

    def make(
        model: ir.Model, *, precision: Any = "float16", kv: KvDtype = "float16", hidden: bool = False, **options: Any
    ) -> Any:
        layout = kv_layout(model, SERVED.BLOCK, kv)
        return SERVED.Served(network_graph(model, precision=precision, kv=layout, hidden=hidden, **options))

    return make


@pytest.fixture(scope="session")
def run() -> Callable[..., dict[str, NDArray[Any]]]:
    """Run a graph of standard ONNX once: `run(model, feeds)` gives its outputs by name."""

    def once(model: ir.Model, feeds: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        session = SERVED.session_of(model)
        wanted = {value.name for value in session.get_inputs()}
        names = [value.name for value in session.get_outputs()]
        found = session.run(None, {name: array for name, array in feeds.items() if name in wanted})
        return dict(zip(names, found, strict=True))

    return once


@pytest.fixture(scope="session")
def reference(run: Callable[..., dict[str, NDArray[Any]]]) -> Callable[..., NDArray[np.float32]]:
    """Logits [T, V] of all tokens of one sequence, in float32: `reference(model, tokens)`."""

    def logits(model: ir.Model, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        places = np.arange(len(tokens))
        feeds = {"input_ids": tokens, "position_ids": places, "logits_rows": places}
        return run(decompose_causal(model), feeds)["logits"]

    return logits


@pytest.fixture(scope="session")
def fuse_all() -> Callable[[ir.Model], ir.Model]:
    """Apply every graph pass, in place."""

    def fuse(model: ir.Model) -> ir.Model:
        for fusion in GRAPH_PASSES:
            if issubclass(fusion, FusionPass):
                apply_rules(model, [rule.compiled() for rule in fusion.rules], Recorder())
        return model

    return fuse


@pytest.fixture(scope="session")
def build() -> Callable[..., bytes]:
    """Build a plan with TensorRT-RTX; skipped where that is not installed."""
    return RTX.build
