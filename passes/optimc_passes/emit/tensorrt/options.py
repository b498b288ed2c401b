"""What recipes may ask of the tensorrt target: looked at before a weight is read, without TensorRT being installed."""

from __future__ import annotations

from importlib.util import find_spec

from optimc.errors import LoweringError, MissingExtraError
from optimc.plan import KvDtype
from optimc.plan.tensorrt_program import HalfType
from optimc_passes.emit.lowered import LoweringOptions
from optimc_passes.emit.tensorrt.flavor import FULL, RTX, flavor_of
from optimc_passes.emit.tensorrt.local_gpu import local_architecture

BACKEND = "tensorrt"
VERSION = 1
PACKAGES = ("tensorrt", "tensorrt-rtx", "triton")
NO_FP8_POOL = "fp8 needs an attention plugin, which the tensorrt target does not have yet"


def precision_of(options: LoweringOptions) -> HalfType:
    """Return what products and attention compute in."""
    return options.precision or "float16"


def rounds_rows(options: LoweringOptions) -> bool:
    """Return whether products with 8-bit weights of one scale per row round their input too, with a scale per token."""
    return options.activation_scales == "row" and options.int8_activations is not False


def kv_dtypes(options: LoweringOptions) -> tuple[KvDtype, ...]:
    """Return what a layer's KV cache may hold: what attention computes in, the default, or int8."""
    return precision_of(options), "int8"


def check_options(options: LoweringOptions) -> dict[str, str]:
    """Return why each option this target refuses is refused, by the option's name."""
    refused = {}
    flavor = flavor_of(options.flavor)
    if options.int8_activations and not rounds_rows(options):
        refused["int8_activations"] = (
            f"the {BACKEND} target has no scale per group of 8-bit activations; set activation_scales: row"
        )
    known = kv_dtypes(options)
    if options.kv_dtype not in (None, *known):
        why = f"; {NO_FP8_POOL}" if options.kv_dtype == "fp8" else ""
        refused["kv_dtype"] = (
            f"the {BACKEND} target has no pool of {options.kv_dtype} with precision {known[0]}; use one of "
            f"{', '.join(known)}{why}"
        )
    if options.gpu is not None and (reason := flavor.refuse(options.gpu)) is not None:
        refused["gpu"] = reason
    if options.builder_level is not None and flavor is RTX:
        refused["builder_level"] = f"{RTX.title} chooses kernels where the plan is served; this is for flavor: tensorrt"
    return refused


def why_not_here(options: LoweringOptions) -> str | None:
    """Return why a plan cannot run on this machine, so that no engine is built in vain; None if it may."""
    built_for = options.gpu or flavor_of(options.flavor).architectures
    try:
        here = local_architecture()
    except (LoweringError, MissingExtraError) as error:
        return str(error)
    return None if not built_for or here in built_for else f"built for {', '.join(built_for)}, this GPU is {here}"


def machine(options: LoweringOptions) -> str | None:
    """Return the GPU of this machine, for which full TensorRT's plans are, and for no other; None for TensorRT-RTX.

    Raises as `local_architecture`.
    """
    return local_architecture() if flavor_of(options.flavor) is FULL else None


def require(options: LoweringOptions) -> None:
    """Raise MissingExtraError for a missing package, LoweringError without the GPU that full TensorRT builds on."""
    flavor = flavor_of(options.flavor)
    flavor.load()
    if find_spec("triton") is None:
        raise MissingExtraError("triton", flavor.name, "compiling CUDA kernels for a TensorRT plan")
    if flavor is not FULL:
        return
    try:
        local_architecture()
    except LoweringError as error:
        raise LoweringError(
            f"{FULL.title} builds on the GPU that serves, and {error}; build there, or use flavor: rtx, which builds "
            "anywhere"
        ) from error
