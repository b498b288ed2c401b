"""One Triton function to one image, without a GPU or a driver."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from optimc.errors import LoweringError, MissingExtraError

PTX = "ptx"
"""Architecture of an image in text form: the driver compiles it for any GPU since capability 8.0."""

CAPABILITIES = (80, 86, 87, 89, 90, 100, 103, 110, 120, 121)
"""Compute capabilities with bfloat16 that Triton's ptxas knows. From 90 on, Triton uses instructions only that very
capability has (sm_90a), so the image runs on no other."""

HIDDEN_ARGUMENTS = ("*i8", "*i8")
"""Triton appends two pointers to every kernel: global scratch and profiler scratch. Ours need neither: pass null."""


@dataclass(frozen=True)
class Specialization:
    """What a Triton function is compiled for."""

    signature: Mapping[str, str]
    """Type of each run-time argument in order: `*i64`, `i32`, `fp32` …."""
    constants: Mapping[str, Any]
    """Value of each compile-time argument."""
    aligned: tuple[str, ...] = ()
    """Pointers and integers that are multiples of 16, which lets loads be wide."""
    num_warps: int = 4
    num_stages: int = 3


@dataclass(frozen=True)
class CompiledKernel:
    """An image and how to launch it."""

    name: str
    """What it does, as in `TensorRtKernel`."""
    architecture: str
    image: bytes
    """A cubin, or PTX text that ends in a zero byte as the driver wants it."""
    function: str
    num_warps: int
    shared_bytes: int
    arguments: tuple[str, ...]
    """Types in order, the hidden ones included."""


def compile_source(name: str, function: Any, what: Specialization, architecture: str) -> CompiledKernel:
    """Compile `function`, a `triton.jit` function, for `architecture`: `sm_80` …, `ptx`, or `ptx_80` … for text with
    the instructions of one capability.

    The same function, specialization, architecture and Triton give the same bytes: no path and no line number goes in.
    Raises MissingExtraError without Triton, LoweringError for an architecture Triton cannot compile for and if Triton
    was told to interpret.
    """
    capability = capability_of(architecture)
    triton = import_triton()
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if not isinstance(function, triton.JITFunction):
        raise LoweringError("TRITON_INTERPRET is set: kernels can be compiled only without it")
    types = dict(what.signature) | dict.fromkeys(what.constants, "constexpr")
    signature = {argument: types[argument] for argument in function.arg_names}
    divisible = {(function.arg_names.index(argument),): [["tt.divisibility", 16]] for argument in what.aligned}
    source = ASTSource(function, signature, dict(what.constants), divisible)
    options: dict[str, Any] = {"num_warps": what.num_warps, "num_stages": what.num_stages, "enable_fp_fusion": True}
    is_text = architecture.startswith(PTX)
    if is_text:
        # The oldest a capability can do with: ISA 8.0 is read by every driver since CUDA 12.0, 9.0 since 13.0.
        options["ptx_version"] = 80 if capability <= 90 else 90
    with _hermetic(triton):
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    metadata = compiled.metadata
    assert metadata.global_scratch_size + metadata.profile_scratch_size == 0, f"{name} wants scratch memory"
    image = compiled.asm["ptx"].encode() + b"\0" if is_text else bytes(compiled.asm["cubin"])
    run_time = tuple(kind for kind in signature.values() if kind != "constexpr")
    return CompiledKernel(
        name, architecture, image, metadata.name, metadata.num_warps, metadata.shared, run_time + HIDDEN_ARGUMENTS
    )


def capability_of(architecture: str) -> int:
    """Return the compute capability to compile for, times ten. Raises LoweringError for one Triton does not know."""
    if architecture == PTX:
        return CAPABILITIES[0]
    match = re.fullmatch(rf"(?:sm|{PTX})_(\d+)", architecture)
    if match is None or int(match[1]) not in CAPABILITIES:
        known = ", ".join([*(f"sm_{capability}" for capability in CAPABILITIES), PTX])
        raise LoweringError(f"our CUDA kernels cannot be compiled for '{architecture}', only for {known}")
    return int(match[1])


def import_triton() -> Any:
    """Return the module. Raises MissingExtraError if it is not installed."""
    try:
        import triton
    except ImportError as error:
        raise MissingExtraError("triton", "rtx", "compiling CUDA kernels for a TensorRT plan") from error
    return triton


@contextmanager
def _hermetic(triton: Any) -> Iterator[None]:
    """Compile without line numbers, which hold paths, and without the user's cache, whose entries may have them."""
    knobs = triton.knobs
    with tempfile.TemporaryDirectory() as folder, knobs.cache.scope(), knobs.compilation.scope():
        knobs.cache.dir = folder
        knobs.compilation.disable_line_info = True
        yield
