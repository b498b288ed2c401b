"""What cannot run here is refused before anything is allocated, in one line that says what to do."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cuda.bindings import driver as real

from optimc.errors import MissingExtraError, OptimcError, PlanCorruptError, PlanTargetError
from optimc.plan import Plan, TargetInfo
from optimc_passes.emit.tensorrt.profiles import model_profiles
from optimc_runtime.executor.load import load_executor
from optimc_runtime.executor.tensorrt.executor import TensorRtExecutor

from .fake_tensorrt import VERSION, FakeEngine


@pytest.fixture(scope="module")
def decoder(tiny_decoder: Any) -> Any:
    return tiny_decoder()


@pytest.fixture(scope="module")
def plan(decoder: Any, tensorrt_plan: Callable[..., Plan]) -> Plan:
    return tensorrt_plan(decoder)


def refusal(plan: Plan, kind: type[OptimcError] = PlanTargetError) -> str:
    with pytest.raises(kind) as told:
        load_executor(plan)
    assert "\n" not in str(told.value)
    return str(told.value)


def with_requirements(make: Callable[..., Plan], decoder: Any, **requirements: str) -> Plan:
    target = TargetInfo(backend="tensorrt", requirements=requirements)
    return make(decoder, changes={"target": target})


def test_another_backend(decoder: Any, make_plan: Callable[..., Plan]) -> None:
    with pytest.raises(PlanTargetError, match="built for 'onnxruntime', this is the tensorrt executor"):
        TensorRtExecutor(make_plan(decoder))


def test_a_requirement_nobody_knows(decoder: Any, tensorrt_plan: Callable[..., Plan]) -> None:
    said = refusal(with_requirements(tensorrt_plan, decoder, moon="full"))
    assert "requires moon full, which this optimc cannot check; update it" in said


@pytest.mark.parametrize(("module", "package"), [("cuda.bindings", "cuda-bindings"), ("tensorrt_rtx", "tensorrt_rtx")])
def test_a_missing_extra(plan: Plan, machine: Any, monkeypatch: pytest.MonkeyPatch, module: str, package: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    said = refusal(plan, MissingExtraError)
    assert said == f"serving {plan.path} needs {package}: pip install 'optimc[rtx]'"


def test_full_tensorrt_has_an_extra_of_its_own(decoder: Any, tensorrt_plan: Callable[..., Plan]) -> None:
    plan = tensorrt_plan(decoder)
    program = {**plan.manifest.program, "flavor": "tensorrt"}
    target = TargetInfo(backend="tensorrt", requirements={"tensorrt": "==11.4.0"})
    said = refusal(tensorrt_plan(decoder, changes={"program": program, "target": target}), MissingExtraError)
    assert "needs tensorrt: pip install 'optimc[tensorrt]'" in said


def test_no_driver(plan: Plan) -> None:
    """This machine, as it is. On one with a GPU the engine is refused instead: it is none."""
    try:
        real.cuInit(0)
        pytest.skip("this machine has a driver")
    except RuntimeError:
        pass
    said = refusal(plan)
    assert said == (
        f"{plan.path}: built for an NVIDIA GPU, and this machine has no NVIDIA driver; serve it on a GPU machine, or "
        "build the recipe with target: cpu"
    )


def test_a_driver_without_a_gpu(plan: Plan, machine: Any) -> None:
    machine.gpu.fail["cuInit"] = real.CUresult.CUDA_ERROR_NO_DEVICE
    assert "this machine has an NVIDIA driver but no GPU that it shows; serve it" in refusal(plan)
    machine.gpu.num_devices = 0
    assert "an NVIDIA driver but no GPU that it shows" in refusal(plan)


def test_a_driver_that_fails(plan: Plan, machine: Any) -> None:
    machine.gpu.fail["cuInit"] = real.CUresult.CUDA_ERROR_SYSTEM_DRIVER_MISMATCH
    assert "no NVIDIA driver that works (CUDA's cuInit failed with CUDA_ERROR_SYSTEM_DRIVER_MISMATCH" in refusal(plan)


def test_a_gpu_that_others_have_filled(plan: Plan, machine: Any) -> None:
    machine.gpu.fail["cuDevicePrimaryCtxRetain"] = real.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    said = refusal(plan)
    assert said.startswith(
        f"{plan.path}: built for an NVIDIA GPU, and this machine's GPU cannot be used (CUDA's cuDevice"
    )
    assert "CUDA_ERROR_OUT_OF_MEMORY" in said


def test_another_version(decoder: Any, tensorrt_plan: Callable[..., Plan], machine: Any) -> None:
    said = refusal(with_requirements(tensorrt_plan, decoder, tensorrt_rtx="==1.2.3.4"))
    assert f"built with tensorrt_rtx 1.2.3.4, installed is {VERSION}, and engines run on the version that built" in said
    assert "pip install 'tensorrt-rtx==1.2.3.4', or rebuild the plan" in said
    machine.load(with_requirements(tensorrt_plan, decoder, tensorrt_rtx=f"=={VERSION}"))


def test_another_flavors_version_is_no_requirement_of_this_one(decoder: Any, tensorrt_plan: Any, machine: Any) -> None:
    said = refusal(with_requirements(tensorrt_plan, decoder, tensorrt="==11.4"))
    assert "requires tensorrt ==11.4, which this optimc cannot check" in said


def test_a_library_that_does_not_load(plan: Plan, machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    found = importlib.import_module

    def import_module(name: str) -> Any:
        if name == "tensorrt_rtx":
            raise OSError("libtensorrt_rtx.so.1: cannot open shared object file")
        return found(name)

    monkeypatch.setattr(importlib, "import_module", import_module)
    said = refusal(plan)
    assert "tensorrt_rtx is installed but does not load: libtensorrt_rtx.so.1: cannot open" in said


def test_a_gpu_the_plan_was_not_built_for(plan: Plan, machine: Any) -> None:
    machine.gpu.architecture = (9, 0)
    said = refusal(plan)
    assert "built for GPUs sm_86, sm_89, this machine's Fake GPU is sm_90; rebuild the plan for sm_90" in said


def test_what_tensorrt_itself_refuses(plan: Plan, machine: Any) -> None:
    machine.trt.validity = (machine.trt.EngineValidity.INVALID, 1 | 4)
    said = refusal(plan)
    assert "engine 'program/model.engine': tensorrt_rtx 9.9.9.1 says it does not run on Fake GPU (sm_89): " in said
    assert "VERSION_MISMATCH, OLD_CUDA_DRIVER; rebuild the plan for this GPU" in said


def test_bytes_that_are_no_engine(decoder: Any, tensorrt_plan: Callable[..., Plan], machine: Any) -> None:
    plan = tensorrt_plan(decoder)
    program = plan.manifest.program
    program = {**program, "model": {**program["model"], "tensor": "kernels/commit_rows.sm_80"}}
    said = refusal(tensorrt_plan(decoder, changes={"program": program}))
    assert "load it on Fake GPU: the magic tag does not match; it has 15 bytes and 8,589,934,592 are free" in said
    assert said.endswith("; if that is room enough, rebuild the plan with this version")


def test_kernels_without_an_image_for_the_gpu(decoder: Any, tensorrt_plan: Callable[..., Plan], machine: Any) -> None:
    plan = tensorrt_plan(decoder)
    kernels = [{**kernel, "architecture": "sm_90"} for kernel in plan.manifest.program["kernels"]]
    plan = tensorrt_plan(decoder, changes={"program": {**plan.manifest.program, "kernels": kernels}})
    said = refusal(plan)
    assert "no image of kernel 'commit_rows' for this machine's sm_89, the plan has sm_90; rebuild it for sm_89" in said


def change_program(plan: Plan, how: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    import copy

    program = copy.deepcopy(plan.manifest.program)
    how(program)
    return program


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (lambda p: p.clear(), r"program section is damaged \(flavor: "),
        (lambda p: p["attention"]["layers"].pop(), "2 layers in the KV layout, 1 in the program"),
        (lambda p: p["attention"]["windows"].pop(), r"layer 1 has window 6, the program has \[0\]"),
        (lambda p: p["model"].update(tensor="nowhere"), "tensor 'nowhere' is missing"),
        (lambda p: p["kernels"][0].update(tensor="nowhere"), "tensor 'nowhere' is missing"),
        (lambda p: p["model"]["profiles"].pop(), "has profiles .*'decode',.*, want"),
        (
            lambda p: [p["model"]["profiles"][0][size].pop("C") for size in ("smallest", "likely", "largest")],
            r"profile 'decode' of .* bounds no \['C'\]",
        ),
        (
            lambda p: p["model"]["profiles"][0]["largest"].pop("C"),
            r"damaged \(model\.profiles\.0: .* name other letters\)",
        ),
        (lambda p: p["model"]["profiles"][1]["largest"].update(T=0), "T from 1 to 0, most likely 64"),
        (
            lambda p: p["model"]["profiles"][1].update(
                largest=p["model"]["profiles"][1]["largest"] | {"T": 32, "Q": 32},
                likely=p["model"]["profiles"][1]["likely"] | {"T": 32, "Q": 32},
            ),
            "limits are 64 tokens a step and 64 a sequence, engine 'program/model.engine' was built for 32 and 64",
        ),
        (
            lambda p: p["kernels"][0].update(arguments=["*i64", "f16"]),
            r"kernel 'commit_rows' for sm_80 takes \(\*i64, f16\), it is given \(\*i64, \*i64, \*i32, \*i64, i32\) and",
        ),
        (lambda p: p["kernels"][0].update(architecture="sm_eighty"), r"damaged \(kernels\.0\.architecture: "),
        (lambda p: p["kernels"][0].update(num_warps=64), r"damaged \(kernels\.0\.num_warps: "),
        (lambda p: p.update(half="bfloat16"), "layer 0 caches float16, the program computes in bfloat16"),
        (
            lambda p: p["attention"]["layers"][0]["keys"].update(pool_scales="s", step_scales="t"),
            "layer 0 caches float16, its ports in the program have scales",
        ),
    ],
)
def test_a_damaged_program_needs_no_gpu_to_be_refused(
    decoder: Any, tensorrt_plan: Callable[..., Plan], how: Callable[[dict[str, Any]], None], says: str
) -> None:
    program = change_program(tensorrt_plan(decoder), how)
    with pytest.raises(PlanCorruptError, match=says):
        load_executor(tensorrt_plan(decoder, changes={"program": program}))


def test_a_damaged_program_is_not_listed(
    decoder: Any, tensorrt_plan: Callable[..., Plan], capsys: pytest.CaptureFixture[str]
) -> None:
    from optimc.cli.inspect import _print_program

    def add_layer(program: dict[str, Any]) -> None:
        program["attention"]["layers"].append(program["attention"]["layers"][0])

    _print_program(plan := tensorrt_plan(decoder), False)
    assert "attention to the whole context: 1 layers" in capsys.readouterr().out
    with pytest.raises(PlanCorruptError, match="2 layers in the KV layout, 3 in the program"):
        _print_program(tensorrt_plan(decoder, changes={"program": change_program(plan, add_layer)}), False)
    assert capsys.readouterr().out == ""


def test_an_engine_that_is_not_the_programs(decoder: Any, tensorrt_plan: Callable[..., Plan], machine: Any) -> None:
    def rename(program: dict[str, Any]) -> None:
        program["attention"]["query_index"] = "somewhere"

    program = change_program(tensorrt_plan(decoder), rename)
    said = refusal(tensorrt_plan(decoder, changes={"program": program}), PlanCorruptError)
    assert "port 'query_index' is an input of int64 in the engine, the program says absent" in said


def test_an_engine_of_another_vocabulary(decoder: Any, tensorrt_plan: Callable[..., Plan], machine: Any) -> None:
    """It would write its logits over what lies behind ours."""
    model = tensorrt_plan(decoder).manifest.model.model_copy(update={"vocab_size": 49})
    said = refusal(tensorrt_plan(decoder, changes={"model": model}), PlanCorruptError)
    assert "engine 'program/model.engine': a row of port 'logits' is [50], the manifest says [49]" in said


def test_a_width_that_tensorrt_does_not_know_is_no_fault(
    plan: Plan, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = FakeEngine.get_tensor_shape
    monkeypatch.setattr(FakeEngine, "get_tensor_shape", lambda self, name: (-1,) * len(shape(self, name)))
    machine.load(plan)
    monkeypatch.setattr(FakeEngine, "get_tensor_shape", lambda *_: (-1, -1, -1))
    assert "a row of port 'logits' is [-1, -1], the manifest says [50]" in refusal(plan, PlanCorruptError)


def test_an_engine_of_other_caches(decoder: Any, tensorrt_plan: Callable[..., Plan], machine: Any) -> None:
    kv = tensorrt_plan(decoder).manifest.kv
    layers = (kv.layers[0].model_copy(update={"head_dim": 4}), *kv.layers[1:])
    said = refusal(tensorrt_plan(decoder, changes={"kv": kv.model_copy(update={"layers": layers})}), PlanCorruptError)
    assert "a row of port '" in said
    assert "' is [16], the manifest says [8]" in said


def test_an_engine_of_smaller_profiles(decoder: Any, tensorrt_plan: Callable[..., Plan], machine: Any) -> None:
    machine.trt.profiles = model_profiles(4, 64, 64)
    said = refusal(tensorrt_plan(decoder), PlanCorruptError)
    assert "profile 'decode' takes 'query_index' up to [4, 16], the program says [8, 16]" in said


def test_an_engine_that_reads_from_the_host(plan: Plan, machine: Any) -> None:
    machine.trt.on_host = ("unpad_index",)
    assert "ports ['unpad_index'] are read on the host, this executor" in refusal(plan, PlanCorruptError)


@pytest.mark.parametrize(
    ("dtype", "says"), [("float32", "wants a float32 KV cache; the tensorrt"), ("fp8", "wants a fp8 KV cache")]
)
def test_another_cache_type(decoder: Any, tensorrt_plan: Callable[..., Plan], dtype: str, says: str) -> None:
    kv = tensorrt_plan(decoder).manifest.kv.model_copy(update={"dtype": dtype})
    assert says in refusal(tensorrt_plan(decoder, changes={"kv": kv}))


def test_nothing_of_it_is_imported_until_a_plan_for_it_is_loaded() -> None:
    source = (
        "import sys; import optimc_runtime.executor.load; "
        "print([name for name in sys.modules if name.split('.')[0] in "
        "('cuda', 'tensorrt', 'tensorrt_rtx', 'triton', 'torch', 'onnx', 'onnxruntime')])"
    )
    result = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_a_plan_for_a_gpu_is_refused_where_its_packages_are_missing(plan: Plan, tmp_path: Path) -> None:
    """As in the environment of a server without extras: neither TensorRT nor CUDA can be imported there."""
    source = (
        "import sys; sys.modules.update(dict.fromkeys(('cuda', 'tensorrt', 'tensorrt_rtx', 'triton', 'torch'))); "
        "from optimc.plan import Plan; from optimc_runtime.executor.load import load_executor; "
        "load_executor(Plan.open(sys.argv[1]))"
    )
    result = subprocess.run([sys.executable, "-c", source, str(plan.path)], capture_output=True, text=True, check=False)
    assert "MissingExtraError" in result.stderr.splitlines()[-1]
    assert "needs cuda-bindings: pip install 'optimc[rtx]'" in result.stderr


def test_choosing_an_image() -> None:
    from optimc_runtime.executor.tensorrt.row_kernels import choose_kernel

    def choose(architecture: str, *has: str) -> str:
        kernels: Any = [SimpleNamespace(name="commit_rows", architecture=each) for each in has]
        return choose_kernel(SimpleNamespace(path="p"), kernels, "commit_rows", architecture).architecture  # type: ignore[arg-type]

    everything = ("sm_80", "sm_86", "sm_90", "ptx")
    assert choose("sm_86", *everything) == "sm_86"
    assert choose("sm_89", *everything) == "sm_86", "later minor versions run it"
    assert choose("sm_90", *everything) == "sm_90"
    assert choose("sm_120", *everything) == "ptx"
    assert choose("sm_121", "sm_120", "ptx") == "ptx", "it uses what only sm_120 has"
    with pytest.raises(PlanTargetError, match="the plan has sm_90; rebuild it for sm_100"):
        choose("sm_100", "sm_90")
