"""The plan's program section, held against its manifest before anything relies on it."""

from __future__ import annotations

from optimc.errors import PlanCorruptError, PlanTargetError
from optimc.plan import Plan
from optimc.plan.program_section import read_program
from optimc.plan.tensorrt_program import TensorRtEngine, TensorRtKernel, TensorRtProgram
from optimc_runtime.executor.tensorrt.row_kernels import ARGUMENTS, KERNELS

KV_DTYPES = ("float16", "bfloat16", "int8")

_LETTERS = {"decode": "TBQCR", "prefill": "TBQCR", "draft": "N"}


def checked_program(plan: Plan) -> TensorRtProgram:
    """Return the program section.

    Imports nothing of TensorRT or CUDA. Raises PlanTargetError for a KV cache this executor has no pool for,
    PlanCorruptError naming what is damaged.
    """
    kv = plan.manifest.kv
    for index, layer in enumerate(kv.layers):
        dtype = kv.dtype_of(index)
        if dtype not in KV_DTYPES or layer.keys != "token":
            per = f" with scales per {layer.keys}" if layer.keys != "token" else ""
            raise PlanTargetError(
                f"{plan.path}: layer {index} wants a {dtype} KV cache{per}; the tensorrt target has "
                f"{', '.join(KV_DTYPES)} with scales per token"
            )
    program = read_program(plan, TensorRtProgram)
    _check_layers(plan, program)
    _check_engine(plan, program.model, ("decode", "prefill"))
    _check_limits(plan, program.model)
    if program.heads is not None:
        _check_engine(plan, program.heads, ("draft",))
    for kernel in program.kernels:
        _check_kernel(plan, kernel)
    return program


def _check_layers(plan: Plan, program: TensorRtProgram) -> None:
    kv, layers = plan.manifest.kv, program.attention.layers
    if len(layers) != len(kv.layers):
        raise PlanCorruptError(f"{plan.path}: {len(kv.layers)} layers in the KV layout, {len(layers)} in the program")
    windows = [window.window for window in program.attention.windows]
    for index, layer in enumerate(layers):
        if layer.window not in windows:
            raise PlanCorruptError(f"{plan.path}: layer {index} has window {layer.window}, the program has {windows}")
        dtype, is_int8 = kv.dtype_of(index), kv.dtype_of(index) == "int8"
        if not is_int8 and dtype != program.half:
            raise PlanCorruptError(f"{plan.path}: layer {index} caches {dtype}, the program computes in {program.half}")
        for cache in (layer.keys, layer.values):
            if is_int8 != (cache.pool_scales is not None) or is_int8 != (cache.step_scales is not None):
                has = "no scales" if is_int8 else "scales"
                raise PlanCorruptError(
                    f"{plan.path}: layer {index} caches {dtype}, its ports in the program have {has}"
                )


def _check_engine(plan: Plan, engine: TensorRtEngine, names: tuple[str, ...]) -> None:
    plan.spec(engine.tensor)
    found = tuple(profile.name for profile in engine.profiles)
    if sorted(found) != sorted(names):
        raise PlanCorruptError(f"{plan.path}: engine '{engine.tensor}' has profiles {found}, want {names}")
    for profile in engine.profiles:
        absent = [letter for letter in _LETTERS[profile.name] if letter not in profile.largest]
        if absent:
            raise PlanCorruptError(f"{plan.path}: profile '{profile.name}' of '{engine.tensor}' bounds no {absent}")


def _check_limits(plan: Plan, engine: TensorRtEngine) -> None:
    """The scheduler forms steps by the manifest's limits; every one of them must fit a profile."""
    limits, largest = plan.manifest.limits, {profile.name: profile.largest for profile in engine.profiles}
    tokens = max(sizes["Q"] for sizes in largest.values())
    context = min(sizes["C"] for sizes in largest.values())
    if limits.max_step_tokens > tokens or limits.max_seq_len > context:
        raise PlanCorruptError(
            f"{plan.path}: limits are {limits.max_step_tokens} tokens a step and {limits.max_seq_len} a sequence, "
            f"engine '{engine.tensor}' was built for {tokens} and {context}"
        )


def _check_kernel(plan: Plan, kernel: TensorRtKernel) -> None:
    plan.spec(kernel.tensor)
    own = kernel.arguments[len(ARGUMENTS) :]
    if kernel.name in KERNELS and (
        kernel.arguments[: len(ARGUMENTS)] != ARGUMENTS or not all(kind.startswith("*") for kind in own)
    ):
        raise PlanCorruptError(
            f"{plan.path}: kernel '{kernel.name}' for {kernel.architecture} takes ({', '.join(kernel.arguments)}), "
            f"it is given ({', '.join(ARGUMENTS)}) and null pointers"
        )
