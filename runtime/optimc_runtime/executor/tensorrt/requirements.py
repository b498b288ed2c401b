"""What a TensorRT plan asks of the machine, checked from the plan outwards: what needs no import first.

In this order: the plan is for this target and its program is sound; the extra is installed; there are a driver and a
GPU; TensorRT is the version that built the engine; the GPU is one it was built for. `row_kernels.py` then looks for
kernels and `engine.py` hears TensorRT's own opinion.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from optimc.errors import EngineError, MissingExtraError, PlanTargetError
from optimc.plan import Plan
from optimc.plan.tensorrt_program import Flavor, TensorRtProgram
from optimc_runtime.executor.tensorrt.checked_program import checked_program
from optimc_runtime.executor.tensorrt.cuda import CudaDevice, checked_call

BACKEND = "tensorrt"

DRIVER = "cuda.bindings.driver"
MODULES: dict[Flavor, str] = {"tensorrt": "tensorrt", "rtx": "tensorrt_rtx"}
"""Module of each flavor; the extra has the flavor's name."""

GPU = "gpu"
"""Requirement that lists the architectures an engine was built for: "sm_80, sm_89"."""


def check_plan(plan: Plan) -> TensorRtProgram:
    """Return the plan's program, if this executor can run it on the right machine. Imports nothing.

    Raises PlanTargetError for another backend, cache type or requirement, PlanCorruptError for a damaged program.
    """
    target = plan.manifest.target
    if target.backend != BACKEND:
        raise PlanTargetError(f"{plan.path}: built for '{target.backend}', this is the {BACKEND} executor")
    program = checked_program(plan)
    for name, wanted in target.requirements.items():
        if name not in (MODULES[program.flavor], GPU):
            raise PlanTargetError(f"{plan.path}: requires {name} {wanted}, which this optimc cannot check; update it")
    return program


def open_machine(plan: Plan, flavor: Flavor) -> tuple[CudaDevice, ModuleType]:
    """Return the GPU and the TensorRT module, the GPU to be closed by the caller.

    Raises MissingExtraError if either package is not installed, PlanTargetError if there is no driver or GPU, or they
    are not what the plan was built for.
    """
    for module, package in (("cuda.bindings", "cuda-bindings"), (MODULES[flavor], MODULES[flavor])):
        if not _is_installed(module):
            raise MissingExtraError(package, flavor, f"serving {plan.path}")
    try:
        device = first_gpu()
    except PlanTargetError as error:
        advice = "serve it on a GPU machine, or build the recipe with target: cpu"
        raise PlanTargetError(f"{plan.path}: built for an NVIDIA GPU, and {error}; {advice}") from error
    try:
        trt = _import_tensorrt(plan, flavor)
        _check_version(plan, trt)
        _check_gpu(plan, device)
    except BaseException:
        device.close()
        raise
    return device, trt


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # no such package above it, or something without a specification has its name
        return False


def first_gpu() -> CudaDevice:
    """Return the machine's first GPU, to be closed by the caller.

    The driver is asked, since TensorRT starts without a GPU and fails later, in its own words. Raises PlanTargetError
    saying what this machine lacks.
    """
    no_gpu = "this machine has an NVIDIA driver but no GPU that it shows"
    no_driver = "this machine has no NVIDIA driver"
    try:
        driver = importlib.import_module(DRIVER)
        checked_call(driver, "cuInit", 0)
        count = checked_call(driver, "cuDeviceGetCount")
    except (ImportError, RuntimeError) as error:  # what cuda-bindings raises without libcuda
        raise PlanTargetError(no_driver) from error
    except EngineError as error:
        is_hidden = "CUDA_ERROR_NO_DEVICE" in str(error)
        raise PlanTargetError(no_gpu if is_hidden else f"{no_driver} that works ({error})") from error
    if not count:
        raise PlanTargetError(no_gpu)
    try:
        return CudaDevice(driver)
    except EngineError as error:  # another process has all its memory, or all of it
        raise PlanTargetError(f"this machine's GPU cannot be used ({error})") from error


def _import_tensorrt(plan: Plan, flavor: Flavor) -> ModuleType:
    name = MODULES[flavor]
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:  # installed, but one of its libraries is missing
        reason = str(error).splitlines()[0]
        raise PlanTargetError(f"{plan.path}: {name} is installed but does not load: {reason}") from error


def _check_version(plan: Plan, trt: ModuleType) -> None:
    """An engine runs on the very version that built it."""
    wanted = plan.manifest.target.requirements.get(trt.__name__)
    if wanted is None:
        return
    number = wanted.removeprefix("==")
    if trt.__version__ != number and not trt.__version__.startswith(f"{number}."):
        raise PlanTargetError(
            f"{plan.path}: built with {trt.__name__} {number}, installed is {trt.__version__}, and engines run on the "
            f"version that built them; pip install '{trt.__name__.replace('_', '-')}=={number}', or rebuild the plan"
        )


def _check_gpu(plan: Plan, device: CudaDevice) -> None:
    wanted = plan.manifest.target.requirements.get(GPU)
    architecture = device.architecture
    if wanted is not None and architecture not in (name.strip() for name in wanted.split(",")):
        raise PlanTargetError(
            f"{plan.path}: built for GPUs {wanted}, this machine's {device.name} is {architecture}; rebuild the plan "
            f"for {architecture}"
        )
