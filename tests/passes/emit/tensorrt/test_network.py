"""Engines from small graphs: weights stay packed, files go away, and what TensorRT objects to names our node.

Builds run without a GPU; what is built here has never been executed.
"""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from optimc.errors import LoweringError, StorageError
from optimc_passes.emit.tensorrt.flavor import FULL, RTX
from optimc_passes.emit.tensorrt.network import BuilderOptions, build_engine
from optimc_passes.emit.tensorrt.profiles import model_profiles

trt = pytest.importorskip("tensorrt_rtx")

PROFILES = model_profiles(max_seqs=4, max_step_tokens=32, max_seq_len=64)
HEADER = '<ir_version: 10, opset_import: ["" : 23, "elsewhere" : 1]>\n'


@pytest.fixture
def build(tmp_path) -> Callable[..., np.ndarray]:
    """Build a graph written as text, with weights by name."""

    def build(text: str, **weights: ir.TensorProtocol) -> np.ndarray:
        model = ir.from_proto(onnx.parser.parse_model(HEADER + text))
        for node in model.graph:
            for value in node.inputs:
                if value is not None and value.name in weights:
                    tensor = weights[value.name]
                    value.const_value, value.shape, value.dtype = tensor, ir.Shape(tensor.shape), tensor.dtype
                    model.graph.initializers[value.name] = value
        options = BuilderOptions(RTX, ("sm_89",), 3, tmp_path, None)
        return build_engine(model, PROFILES, options, trt)

    return build


PRODUCT = """g (float16[T, 256] x) => (float16[T, 512] y) {
    [layer_0_dense] w = DequantizeLinear <axis: int = 0, block_size: int = %d> (codes, scales)
    [layer_0_product] y = MatMul(x, w)
}"""


def product_weights(dtype: ir.DataType, block: int) -> dict[str, ir.TensorProtocol]:
    rng = np.random.default_rng(0)
    codes = rng.integers(-8, 8, (256, 512)).astype(dtype.numpy())
    scales = rng.random((256 // block, 512)).astype(np.float16)
    return {"codes": ir.Tensor(codes, dtype=dtype), "scales": ir.Tensor(scales)}


@pytest.fixture(scope="module")
def sizes() -> dict[str, int]:
    return {}


@pytest.mark.parametrize(
    ("dtype", "block", "code_bytes"),
    [(ir.DataType.INT4, 64, 0.5), (ir.DataType.INT4, 16, 0.5), (ir.DataType.INT8, 128, 1), (ir.DataType.INT8, 64, 1)],
)
def test_weights_stay_packed_in_the_engine(build, dtype, block, code_bytes):
    weights = product_weights(dtype, block)
    small = build(PRODUCT % block, **weights)
    wide = {name: ir.Tensor(np.tile(tensor.numpy(), (1, 32)), dtype=tensor.dtype) for name, tensor in weights.items()}
    large = build((PRODUCT % block).replace("512", "16384"), **wide)
    added = 31 * 256 * 512 * (code_bytes + 2 / block)
    assert abs(large.nbytes - small.nbytes - added) < 0.1 * added, "what is there beside weights is the same in both"


def test_an_engine_is_mapped_from_a_file_without_a_name(build, tmp_path):
    engine = build(PRODUCT % 64, **product_weights(ir.DataType.INT4, 64))
    assert bytes(engine[:4]) == b"vtrt"
    assert isinstance(engine, np.memmap)
    assert list(tmp_path.iterdir()) == []


def test_weights_are_read_once_each_and_leave_no_file(build, tmp_path):
    reads = []
    weights = {}
    for name, tensor in product_weights(ir.DataType.INT4, 64).items():

        def load(name=name, tensor=tensor):
            reads.append(name)
            return tensor

        weights[name] = ir.LazyTensor(load, tensor.dtype, tensor.shape, name=name)
    build(PRODUCT % 64, **weights)
    assert sorted(reads) == ["codes", "scales"]
    assert [name for name in open_files() if name.startswith(str(tmp_path))] == []


def open_files() -> list[str]:
    return [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]


def test_an_input_that_nothing_reads_is_refused_by_name(build):
    text = """g (float16[T, 8] x, float16[T, 8] idle, float16[T, 8] cut) => (float16[T, 8] y) {
        y = Relu(x)
        dead = Relu(cut)
    }"""
    with pytest.raises(LoweringError, match="nothing in the graph for TensorRT reads 'idle', 'cut'; a pass cut them"):
        build(text)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("[layer_0_far] y = elsewhere.Teleport(x)", "node 'layer_0_far' elsewhere::Teleport: .*Plugin not found"),
        ("[layer_0_sum] y = Add(x, z)", "node 'layer_0_sum' onnx::Add: .*must have same input types"),
        ("[layer_0_mm] y = MatMul(x, nine)", "node 'layer_0_mm' onnx::MatMul: .* must match"),
    ],
)
def test_what_the_parser_does_not_understand_names_our_node(build, body, sentence):
    inputs = "float[T, 8] x" + (", float16[T, 8] z" if "z" in body else "")
    with pytest.raises(LoweringError, match=f"^{sentence}") as caught:
        build(f"g ({inputs}) => (float[T, 8] y) {{ {body} }}", nine=ir.tensor(np.ones((9, 8), np.float32)))
    message = str(caught.value)
    assert "TensorRT-RTX cannot build the graph" in message
    assert len(message.splitlines()) == 1
    assert "cudaError" not in message, "that there is no driver is no news"


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        # By the node's name, by a weight's, by a value's, and by the kind of layer alone.
        (
            "[layer_0_shape] y = Reshape(x, sides)",
            "node 'layer_0_shape' onnx::Reshape: .*reshaping failed for tensor: x",
        ),
        (
            "[layer_0_look] rows = Gather(codes, ids)\n[layer_0_dense] y = DequantizeLinear(rows, one)",
            "node 'layer_0_look' onnx::Gather: .*Quantized constant",
        ),
        (
            "[layer_0_narrow] c = Cast<to: int = 22>(x)\n[layer_0_dense] y = DequantizeLinear(c, one)",
            "node 'layer_0_narrow' onnx::Cast: .*Tensor c has datatype Int4",
        ),
        (
            "[layer_0_attend] y = Attention<q_num_heads: int = 2, kv_num_heads: int = 2>(q, k, v)",
            "node 'layer_0_attend' onnx::Attention: .*not supported by a dedicated kernel",
        ),
    ],
)
def test_what_the_builder_cannot_build_names_our_node(build, body, sentence):
    inputs = {
        "x": "float[T, 8]",
        "ids": "int64[T]",
        "q": "float[B, 4, 64]",
        "k": "float[B, 4, 64]",
        "v": "float[B, 4, 64]",
    }
    words = set(re.findall(r"\w+", body))
    read = ", ".join(f"{kind} {name}" for name, kind in inputs.items() if name in words)
    answered = "float[B, 4, 64]" if "q" in words else "float[T, 64]" if "ids" in words else "float[T, 8]"
    weights = {
        "sides": ir.tensor(np.array([-1, 7], np.int64)),
        "codes": ir.tensor(np.ones((32, 64), np.int8)),
        "one": ir.tensor(np.array(1, np.float32)),
    }
    with pytest.raises(LoweringError, match=f"^{sentence}"):
        build(f"g ({read}) => ({answered} y) {{ {body} }}", **weights)


def test_a_weight_the_parser_has_no_type_for_names_who_reads_it(build):
    codes = ir.Tensor(np.ones((256, 512), np.uint8), dtype=ir.DataType.UINT4)
    weights = product_weights(ir.DataType.INT4, 64) | {"codes": codes}
    sentence = r"^node 'layer_0_dense' onnx::DequantizeLinear: .*weight codes of 65536 bytes"
    with pytest.raises(LoweringError, match=sentence):
        build(PRODUCT % 64, **weights)


def test_after_a_failure_the_next_build_is_heard_too(build):
    """The process has one logger; messages must not go to a build that is over."""
    for node in ("first", "second"):
        with pytest.raises(LoweringError, match=f"node '{node}'"):
            build(f"g (float[T, 8] x) => (float[T, 8] y) {{ [{node}] y = elsewhere.Teleport(x) }}")


def test_a_full_disk_is_a_storage_error(build, monkeypatch):
    import optimc_passes.emit.tensorrt.network as network

    class Full:
        def __init__(self, file):
            self._file = file

        def write(self, data):
            raise OSError(28, "No space left on device")

        def __getattr__(self, name):
            return getattr(self._file, name)

    real = network.tempfile.TemporaryFile
    monkeypatch.setattr(network, "tempfile", SimpleNamespace(TemporaryFile=lambda dir: Full(real(dir=dir))))
    with pytest.raises(StorageError, match="an engine cannot be written to .*No space left"):
        build("g (float[T, 8] x) => (float[T, 8] y) { y = Relu(x) }")


def test_full_tensorrt_gets_its_level_and_no_list_of_gpus(tmp_path, monkeypatch):
    """Full TensorRT is not installed here: its sibling stands in, and what the builder is told is looked at."""
    import optimc_passes.emit.tensorrt.network as network

    told = []
    real = network._configured
    monkeypatch.setattr(network, "_configured", lambda *args: told.append(real(*args)) or told[0])
    model = ir.from_proto(onnx.parser.parse_model(HEADER + "g (float[T, 8] x) => (float[T, 8] y) { y = Relu(x) }"))
    build_engine(model, PROFILES, BuilderOptions(FULL, ("sm_90",), 5, tmp_path, None), trt)
    (config,) = told
    assert config.builder_optimization_level == 5
    assert config.num_compute_capabilities == 0
    assert config.num_optimization_profiles == 2
    assert not config.get_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)


def test_a_graph_without_weights_builds_in_a_folder_that_is_not_there_yet(tmp_path):
    model = ir.from_proto(onnx.parser.parse_model(HEADER + "g (float[T, 8] x) => (float[T, 8] y) { y = Relu(x) }"))
    options = BuilderOptions(RTX, ("sm_89",), 3, tmp_path / "deep" / "folder", None)
    assert build_engine(model, PROFILES, options, trt).nbytes > 0


def test_a_place_that_cannot_be_written_is_a_storage_error(tmp_path):
    (tmp_path / "file").write_text("")
    model = ir.from_proto(onnx.parser.parse_model(HEADER + "g (float[T, 8] x) => (float[T, 8] y) { y = Relu(x) }"))
    options = BuilderOptions(RTX, ("sm_89",), 3, tmp_path / "file", None)
    with pytest.raises(StorageError, match="an engine cannot be written to"):
        build_engine(model, PROFILES, options, trt)
