"""Lowering without native kernels: programs run in the NumPy interpreter beside this file."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from onnx_ir.passes.common import RemoveUnusedNodesPass
from onnx_ir.tape import Tape

from optimc_passes.base import Pass
from optimc_passes.dialect.decompose import decompose_causal
from optimc_passes.emit import Lowered, LoweringOptions
from optimc_passes.emit.cpu.lower import lower
from optimc_passes.fuse.apply_rules import apply_rules
from optimc_passes.fuse.merge_gate_up import MergeGateUp
from optimc_passes.fuse.merge_qkv import MergeQkv
from optimc_passes.fuse.pipeline import GRAPH_PASSES
from optimc_passes.fuse.recorder import Recorder
from optimc_passes.fuse.rule import FusionPass

TESTS = Path(__file__).parents[3]


def _load(path: Path) -> ModuleType:
    """Import a file of the tests: pytest imports test files apart from each other."""
    name = f"cpu_tests_{path.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture(scope="session")
def interpret() -> ModuleType:
    """The interpreter: `Interpreter(lowered).run(tokens, rows)`, `memory_faults(program)`."""
    return _load(Path(__file__).with_name("interpret.py"))


@pytest.fixture(scope="session")
def families() -> dict[str, Any]:
    """The families of tests/e2e/test_architectures.py."""
    return _load(TESTS / "e2e/test_architectures.py").FAMILIES


@pytest.fixture(scope="session")
def make_case() -> Callable[[str], Any]:
    """A family by its name, exported once a session."""
    return functools.cache(_load(TESTS / "e2e/test_architectures.py")._make_case)


def _lowered(model: ir.Model, **changed: Any) -> Lowered:
    options = {
        "block_size": 16,
        "int8_activations": None,
        "activation_scales": "group",
        "kv_dtype": "float32",
        "max_step_tokens": 64,
        "max_seqs": 4,
    }
    return lower(model, LoweringOptions(**{**options, **changed}))


@pytest.fixture(scope="session")
def lowered() -> Callable[..., Lowered]:
    """Lower a graph; keyword arguments are `LoweringOptions`."""
    return _lowered


def _fuse(model: ir.Model, passes: Sequence[type[Pass[Any]]] = (MergeQkv, MergeGateUp)) -> ir.Model:
    for fusion in passes:
        if issubclass(fusion, FusionPass):
            apply_rules(model, [rule.compiled() for rule in fusion.rules], Recorder())
    return RemoveUnusedNodesPass()(model).model


@pytest.fixture(scope="session")
def fuse() -> Callable[[ir.Model], ir.Model]:
    """Merge projections, in place."""
    return _fuse


@pytest.fixture(scope="session")
def fuse_all() -> Callable[[ir.Model], ir.Model]:
    """Apply every graph pass, in place."""
    return functools.partial(_fuse, passes=GRAPH_PASSES)


def _unnamed(lowered: Lowered) -> Any:
    keys = {key: f"weight {index}" for index, key in enumerate(lowered.program["weights"])}

    def walk(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {keys.get(name, name): walk(each, name) for name, each in value.items() if name != "name"}
        if isinstance(value, list):
            return [walk(each, key) for each in value]
        return None if key == "tensor" else keys.get(value, value) if isinstance(value, str) else value

    return walk(lowered.program)


@pytest.fixture(scope="session")
def unnamed() -> Callable[[Lowered], Any]:
    """A program without names, for comparison; weights are called by the order of their first use."""
    return _unnamed


def _reference(model: ir.Model, tokens: np.ndarray, rows: np.ndarray) -> np.ndarray:
    proto = ir.to_proto(decompose_causal(model)).SerializeToString()
    options = onnxruntime.SessionOptions()
    # As written: optimized, it multiplies quantized weights with rounded activations.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(proto, options, providers=["CPUExecutionProvider"])
    feeds = {"input_ids": tokens, "position_ids": np.arange(len(tokens)), "logits_rows": rows}
    return session.run(["logits"], feeds)[0]


@pytest.fixture(scope="session")
def reference() -> Callable[..., np.ndarray]:
    """Logits [R, V] of a dialect graph in ONNX Runtime: `reference(model, tokens, rows)`."""
    return _reference


class SmallGraph:
    """Embedding, whatever a test puts there, one attention layer, whatever a test puts there, a head.

    `before(graph, x)` and `after(graph, x)` change the rows [1, T, 32] before and after attention.
    """

    vocab, hidden = 40, 32

    def __init__(self, before: Any = None, after: Any = None, head: Any = None) -> None:
        self.tape = Tape()
        self._rng = np.random.default_rng(3)
        self._initializers: list[ir.Value] = []
        integers = ir.TensorType(ir.DataType.INT64)
        self.inputs = [
            ir.Value(name=name, type=integers, shape=ir.Shape([axis]))
            for name, axis in (("input_ids", "T"), ("position_ids", "T"), ("logits_rows", "R"))
        ]
        self.table = self.weight("embed", self.vocab, self.hidden)
        x = self.op("Unsqueeze", self.op("Gather", self.table, self.inputs[0]), self.ints(0))
        x = before(self, x) if before else x
        q, k, v = (
            self.op("MatMul", x, self.weight(name, self.hidden, n)) for name, n in (("q", 32), ("k", 16), ("v", 16))
        )
        packed = [self.op("Reshape", y, self.ints(-1, n)) for y, n in ((q, 32), (k, 16), (v, 16))]
        attributes = {"layer": 0, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
        out = self.op("PagedAttention", *packed, domain="optimc", **attributes, scale=0.35, window=0, softcap=0.0)
        out = self.op("MatMul", self.op("Reshape", out, self.ints(1, -1, 32)), self.weight("o", 32, 32))
        x = self.op("Add", x, out)
        x = after(self, x) if after else x
        x = self.op("Gather", x, self.inputs[2], axis=1)
        logits = head(self, x) if head else self.op("MatMul", x, self.weight("head", self.hidden, self.vocab))
        logits = self.op("Squeeze", logits, self.ints(0))
        logits.name, logits.dtype, logits.shape = "logits", ir.DataType.FLOAT, ir.Shape(["R", self.vocab])
        graph = ir.Graph(
            self.inputs,
            [logits],
            nodes=self.tape.nodes,
            initializers=self._initializers,
            opset_imports={"": 23, "optimc": 1},
            name="small",
        )
        self.model = ir.Model(graph, ir_version=10)

    def op(self, op_type: str, *inputs: ir.Value | None, domain: str = "", **attributes: Any) -> ir.Value:
        return self.tape.op(op_type, inputs, attributes, domain=domain)

    def constant(self, name: str, array: np.ndarray) -> ir.Value:
        tensor = ir.tensor(array, name=name)
        value = ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
        self._initializers.append(value)
        return value

    def weight(self, name: str, *shape: int) -> ir.Value:
        """A float32 initializer; matrices keep the size of what they multiply."""
        array = self._rng.standard_normal(shape).astype(np.float32)
        return self.constant(name, array / np.float32(np.sqrt(shape[0])) if len(shape) == 2 else array)

    def scalar(self, value: float) -> ir.Value:
        return self.constant(f"scalar_{len(self._initializers)}", np.array(value, np.float32))

    def ints(self, *values: int) -> ir.Value:
        return self.constant(f"ints_{len(self._initializers)}", np.array(values, np.int64))


@pytest.fixture(scope="session")
def small_graph() -> type[SmallGraph]:
    """A graph to put operators into."""
    return SmallGraph


@pytest.fixture(scope="session")
def compare(interpret: ModuleType) -> Callable[..., float]:
    """Largest difference of a program's logits from ONNX Runtime's, relative to the largest of those.

    `compare(model, lowered)` runs 12 tokens and asks for some rows, some twice.
    """

    def run(model: ir.Model, lowered: Lowered) -> float:
        tokens, rows = np.random.default_rng(5).integers(0, 40, 12), np.array([2, 11, 2, 0])
        run = interpret.Interpreter(lowered)
        assert interpret.memory_faults(run.program) == []
        expected = _reference(model, tokens, rows)
        return float(np.abs(run.run(tokens, rows) - expected).max() / np.abs(expected).max())

    return run
