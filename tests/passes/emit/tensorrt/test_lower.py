"""Plans for TensorRT: engines, kernels and a program section that says how to talk to them.

Engines are built by TensorRT-RTX, which needs no GPU; none has ever been executed.
"""

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from optimc.errors import LoweringError, MissingExtraError
from optimc.plan.tensorrt_program import TensorRtProgram
from optimc_passes.artifact import Artifact
from optimc_passes.choices import Choices, KvChoice
from optimc_passes.emit import TARGETS, LoweringOptions
from optimc_passes.emit.onnx_hidden import HIDDEN
from optimc_passes.emit.tensorrt import flavor, local_gpu, options
from optimc_passes.emit.tensorrt.lower import HEADS_TENSOR, MODEL_TENSOR
from optimc_passes.graph.attach import attach_weights

RTX = LoweringOptions(
    block_size=4,
    int8_activations=None,
    activation_scales="group",
    kv_dtype=None,
    max_step_tokens=64,
    max_seqs=8,
    max_seq_len=256,
    flavor="rtx",
)
TARGET = TARGETS["tensorrt"]
INT8 = KvChoice("int8", "token", "dynamic", 0)
SCHEMES = {
    "fp16": None,
    "int4 symmetric": {"bits": 4, "group": 64, "symmetric": True},
    "int4 asymmetric": {"bits": 4, "group": 64},
    "int8": {"bits": 8, "group": 9999, "symmetric": True},
    "w8a8": {"bits": 8, "group": 9999, "symmetric": True},
}
BYTES = {"fp16": 2, "int4 symmetric": 0.5 + 2 / 64, "int4 asymmetric": 0.5 + 4 / 64, "int8": 1, "w8a8": 1}
"""Of a weight in the plan."""


def changed(**changes):
    return replace(RTX, **changes)


@pytest.fixture(scope="module")
def artifact(tiny_decoder, quantized, heads_tests):
    """A decoder whose linear layers hold codes of a scheme, with heads or a cache's format if asked."""

    def make(scheme=None, heads=False, kv=(), **sizes):
        sizes = {"vocab": heads_tests.VOCAB, "hidden": heads_tests.HIDDEN, "head_dim": 16, "layers": 1} | sizes
        decoder = tiny_decoder(**sizes)
        store = decoder.store
        if scheme is not None:
            linears = [name for name in decoder.arrays if name.endswith("proj.weight")]
            store = store.replace({name: quantized(decoder.arrays[name], **scheme) for name in linears})
        made = heads_tests.make_heads() if heads else None
        checkpoint = decoder.checkpoint()
        graph = attach_weights(decoder.model, store)
        return Artifact("key", checkpoint, store, choices=Choices(kv=kv), graph=graph, heads=made)

    return make


@pytest.fixture(scope="module")
def built(artifact):
    """The plain plan, with heads."""
    pytest.importorskip("tensorrt_rtx")
    return TARGET(artifact(heads=True), changed(cache=None))


def engine_bytes(lowered, name=MODEL_TENSOR):
    (tensor,) = (tensor for tensor in lowered.tensors if tensor.name == name)
    data = tensor.load()
    assert data.nbytes == tensor.nbytes
    assert bytes(data[:4]) == b"vtrt"
    return data.nbytes


def test_the_plan_holds_engines_and_kernels_and_says_where(built):
    program = TensorRtProgram.model_validate(built.program)
    assert (program.flavor, program.half, program.hidden) == ("rtx", "float16", HIDDEN)
    assert program.heads is not None
    names = {tensor.name for tensor in built.tensors}
    assert names == {program.model.tensor, program.heads.tensor, *(kernel.tensor for kernel in program.kernels)}
    for name in (MODEL_TENSOR, HEADS_TENSOR):
        assert engine_bytes(built, name) > 0


def test_profiles_are_those_of_the_limits(built):
    program = TensorRtProgram.model_validate(built.program)
    decode, prefill = program.model.profiles
    assert (decode.name, prefill.name) == ("decode", "prefill")
    assert decode.largest == {"T": 64, "B": 8, "Q": 16, "C": 256, "R": 64}
    assert prefill.largest == {"T": 64, "B": 1, "Q": 64, "C": 256, "R": 64}
    assert [profile.largest for profile in program.heads.profiles] == [{"N": 8}]


def test_the_cache_is_half_unless_asked_otherwise(built):
    assert built.kv.dtypes == ("float16",)
    (layer,) = TensorRtProgram.model_validate(built.program).attention.layers
    assert (layer.keys.pool, layer.keys.pool_scales) == ("key_pool_0", None)


def test_requirements_name_version_and_gpus(built):
    trt = pytest.importorskip("tensorrt_rtx")
    assert built.requirements == {
        "tensorrt_rtx": f"=={trt.__version__}",
        "gpu": "sm_80, sm_86, sm_89, sm_120, sm_121",
    }
    kernels = TensorRtProgram.model_validate(built.program).kernels
    assert {kernel.architecture for kernel in kernels} == {*flavor.RTX.architectures, "ptx"}


@pytest.mark.parametrize("scheme", list(SCHEMES))
def test_every_scheme_lowers_and_its_plan_is_as_small_as_its_codes(artifact, scheme, tmp_path):
    pytest.importorskip("tensorrt_rtx")
    sizes = []
    for intermediate in (512, 8192):
        wide = artifact(SCHEMES[scheme], hidden=256, head_dim=64, intermediate=intermediate)
        rounds = "row" if scheme == "w8a8" else "group"
        wanted = changed(gpu=("sm_89",), cache=tmp_path, activation_scales=rounds)
        sizes.append(engine_bytes(TARGET(wide, wanted)))
    added = 3 * 256 * (8192 - 512)
    # Source text of kernels is part of an engine, and other shapes get other kernels: some 100 kB each.
    assert (sizes[1] - sizes[0]) / added == pytest.approx(BYTES[scheme], abs=0.1)
    assert list(tmp_path.iterdir()) == [], "nothing is left of weights and engines"


def test_a_cache_of_int8_by_option_and_by_choice(artifact):
    pytest.importorskip("tensorrt_rtx")
    for lowered in (
        TARGET(artifact(), changed(kv_dtype="int8", gpu=("sm_89",))),
        TARGET(artifact(kv=(INT8,)), changed(precision="bfloat16", gpu=("sm_89",))),
    ):
        assert lowered.kv.dtypes == ("int8",)
        (layer,) = TensorRtProgram.model_validate(lowered.program).attention.layers
        assert layer.values.pool_scales is not None
    assert lowered.program["half"] == "bfloat16"


def test_a_cache_it_has_no_form_for_is_refused_before_the_graph_is_looked_at(artifact):
    for choice, reason in (
        (KvChoice("int4", "token", "dynamic", 0), "no kernels for keys and values in int4, use one of float16, int8"),
        (KvChoice("int8", "channel", "calibrated", 8), "keys with a scale per channel, set keys: token"),
    ):
        with pytest.raises(LoweringError, match=reason):
            TARGET(artifact(kv=(choice,)), RTX)


def test_lowering_twice_gives_the_same_section(artifact, built):
    again = TARGET(artifact(heads=True), RTX)
    assert again.program == built.program
    assert [tensor.nbytes for tensor in again.tensors] == [tensor.nbytes for tensor in built.tensors]


def test_what_is_not_installed_is_named_with_its_extra(monkeypatch, artifact):
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(MissingExtraError, match=r"flavor tensorrt, needs tensorrt: pip install 'optimc\[tensorrt\]'"):
        TARGET.require(changed(flavor=None))
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    for call in (TARGET.require, lambda wanted: TARGET(artifact(), wanted)):
        with pytest.raises(MissingExtraError, match=r"needs tensorrt_rtx: pip install 'optimc\[rtx\]'"):
            call(RTX)


def test_full_tensorrt_wants_the_gpu_it_builds_for_before_a_pass_runs(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt", SimpleNamespace(__version__="11.4.0"))

    def nothing():
        raise LoweringError("this machine has no NVIDIA GPU that can be used (no driver)")

    monkeypatch.setattr(options, "local_architecture", nothing)
    with pytest.raises(LoweringError, match=r"TensorRT builds on the GPU that serves, .*use flavor: rtx"):
        TARGET.require(changed(flavor="tensorrt"))
    monkeypatch.setattr(options, "local_architecture", lambda: "sm_90")
    TARGET.require(changed(flavor="tensorrt"))


def test_whether_a_plan_can_run_where_it_is_built_is_known_before_it_is_built(monkeypatch):
    monkeypatch.setattr(options, "local_architecture", lambda: "sm_89")
    assert TARGET.why_not_here(RTX) is None
    assert TARGET.why_not_here(changed(flavor="tensorrt")) is None
    assert TARGET.why_not_here(changed(gpu=("sm_120",))) == "built for sm_120, this GPU is sm_89"


def test_the_driver_is_asked_for_the_gpu(monkeypatch):
    class Result:
        CUDA_SUCCESS = SimpleNamespace(name="CUDA_SUCCESS")
        ERROR = SimpleNamespace(name="CUDA_ERROR_NO_DEVICE")

    values = {"MAJOR": 9, "MINOR": 0}
    names = {f"CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_{name}": value for name, value in values.items()}
    driver = SimpleNamespace(
        CUresult=Result,
        CUdevice_attribute=SimpleNamespace(**names),
        cuInit=lambda flags: (Result.CUDA_SUCCESS,),
        cuDeviceGet=lambda index: (Result.CUDA_SUCCESS, index),
        cuDeviceGetAttribute=lambda value, device: (Result.CUDA_SUCCESS, value),
    )
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=driver))
    assert local_gpu.local_architecture() == "sm_90"
    driver.cuInit = lambda flags: (Result.ERROR,)
    with pytest.raises(LoweringError, match="no NVIDIA GPU that can be used .CUDA_ERROR_NO_DEVICE."):
        local_gpu.local_architecture()


def test_naming_targets_imports_neither_tensorrt_nor_triton():
    code = (
        "import sys; from optimc_passes.emit import TARGETS; TARGETS['tensorrt'];"
        "found = [name for name in ('tensorrt', 'tensorrt_rtx', 'triton', 'cuda') if name in sys.modules];"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
