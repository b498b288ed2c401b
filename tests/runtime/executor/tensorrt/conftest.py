"""Plans for TensorRT whose engine is the ONNX graph itself, and a machine for them: fake_gpu, fake_tensorrt."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import onnx_ir as ir
import pytest

from optimc.plan import KvDtype, Plan, PlanTensor, TargetInfo
from optimc.plan.tensorrt_program import TensorRtEngine, TensorRtKernel, TensorRtProgram
from optimc_passes.emit import Lowered
from optimc_passes.emit.heads_tensors import described_heads, draft_vocab_tensors
from optimc_passes.emit.kv_layout import kv_layout
from optimc_passes.emit.tensorrt.heads_graph import heads_graph
from optimc_passes.emit.tensorrt.network_graph import network_graph
from optimc_passes.emit.tensorrt.profiles import draft_profile, model_profiles
from optimc_passes.emit.tensorrt_kernels.rows_reference import commit_rows, gather_rows
from optimc_passes.heads.heads import Heads
from optimc_runtime.executor.load import load_executor
from optimc_runtime.executor.tensorrt.executor import TensorRtExecutor

MISSING = [name for name in ("cuda", "tensorrt_rtx") if find_spec(name) is None]
"""The fakes take enumerations from the real modules, which the extra `rtx` brings."""
collect_ignore_glob = ["test_*.py"] if MISSING else []
if not MISSING:
    from .fake_gpu import FakeDriver, FakeGpu, RowKernel
    from .fake_tensorrt import VERSION, FakeTensorRt

ARGUMENTS = ("*i64", "*i64", "*i32", "*i64", "i32", "*i8", "*i8")
KERNELS = tuple(
    TensorRtKernel(
        name=name,
        architecture="sm_80",
        tensor=f"kernels/{function}.sm_80",
        function=function,
        num_warps=4,
        shared_bytes=0,
        arguments=ARGUMENTS,
    )
    for name, function in (
        ("commit_rows", "commit_rows"),
        ("gather_rows", "gather_rows"),
        ("scatter_rows", "commit_rows"),
    )
)
MAX_SEQS, MAX_STEP_TOKENS, MAX_SEQ_LEN = 8, 64, 64


class Machine:
    """The fake GPU, the fake TensorRT on it, and executors of the plans that are loaded there."""

    def __init__(self) -> None:
        self.gpu = FakeGpu()
        profiles = model_profiles(MAX_SEQS, MAX_STEP_TOKENS, MAX_SEQ_LEN)
        self.trt = FakeTensorRt(self.gpu, profiles, (draft_profile(MAX_SEQS),))
        self.kernels: dict[str, Any] = {
            "commit_rows": RowKernel(commit_rows),
            "gather_rows": RowKernel(gather_rows),
        }
        self.driver = FakeDriver(self.gpu, self.kernels)
        self.loaded: list[TensorRtExecutor] = []

    def load(self, plan: Plan, **options: Any) -> TensorRtExecutor:
        executor = load_executor(plan, **options)
        assert isinstance(executor, TensorRtExecutor)
        self.loaded.append(executor)
        return executor


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """A machine with a GPU. Whatever a test does on it, closing its executors must leave nothing behind."""
    machine = Machine()
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", machine.driver)  # type: ignore[arg-type]
    module: Any = machine.trt
    module.__spec__ = ModuleType("tensorrt_rtx").__spec__ or sys.modules["cuda.bindings"].__spec__
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", module)
    yield machine
    for executor in machine.loaded:
        executor.close()
    assert machine.gpu.num_alive == 0, (machine.gpu.memory.keys(), machine.gpu.handles)
    assert not machine.trt.alive, "contexts end before the GPU's does"


@pytest.fixture(scope="session")
def lower_tensorrt() -> Callable[..., Lowered]:
    """Lower a dialect graph as the tensorrt target does, but for the engine, which is the ONNX graph."""

    def make(
        model: ir.Model,
        *,
        block_size: int = 4,
        precision: Any = "float16",
        kv: KvDtype | None = None,
        hidden: bool = False,
        heads: Heads | None = None,
    ) -> Lowered:
        layout = kv_layout(model, block_size, kv or precision)
        network = network_graph(model, precision=precision, kv=layout, hidden=hidden or heads is not None)
        tensors = [
            PlanTensor.from_bytes("program/model.engine", ir.to_proto(network.model).SerializeToString()),
            PlanTensor.from_bytes("kernels/commit_rows.sm_80", b"image of commit"),
            PlanTensor.from_bytes("kernels/gather_rows.sm_80", b"image of gather"),
        ]
        engine = TensorRtEngine(
            tensor="program/model.engine", profiles=model_profiles(MAX_SEQS, MAX_STEP_TOKENS, MAX_SEQ_LEN)
        )
        draft = None
        if heads is not None:
            graph = ir.to_proto(heads_graph(heads, model, precision=precision)).SerializeToString()
            tensors += [PlanTensor.from_bytes("program/heads.engine", graph), *draft_vocab_tensors(heads)]
            draft = TensorRtEngine(tensor="program/heads.engine", profiles=(draft_profile(MAX_SEQS),))
        program = TensorRtProgram(
            flavor="rtx",
            half=precision,
            model=engine,
            attention=network.attention,
            hidden=network.hidden,
            heads=draft,
            kernels=KERNELS,
        )
        requirements = {"tensorrt_rtx": f"=={VERSION}", "gpu": "sm_86, sm_89"}
        return Lowered(program.model_dump(mode="json"), tensors, requirements, layout)

    return make


@pytest.fixture(scope="session")
def tensorrt_plan(
    lower_tensorrt: Callable[..., Lowered],
    write_lowered: Callable[..., Plan],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., Plan]:
    """A plan of a tiny decoder for TensorRT; `changes` are the manifest's."""

    def make(decoder: Any, changes: dict[str, Any] | None = None, **options: Any) -> Plan:
        model = decoder.graph()
        head = model.graph.outputs[0].producer().inputs[1]
        head.shape = ir.Shape(decoder.weights["embed"].shape[::-1])  # heads look at it
        lowered = lower_tensorrt(model, **options)
        path = tmp_path_factory.mktemp("plan") / "engine.plan"
        target = TargetInfo(backend="tensorrt", requirements=lowered.requirements)
        medusa = described_heads(options["heads"]) if "heads" in options else None
        return write_lowered(path, lowered, **{"target": target, "medusa": medusa, **(changes or {})})

    return make
