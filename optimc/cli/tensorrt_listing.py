"""A TensorRT plan's program as text: its engines with the shapes they were built for, its caches, its kernels.

Letters are those of `optimc.plan.tensorrt_program`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from optimc.cli.format import format_bytes
from optimc.plan import KvLayout
from optimc.plan.tensorrt_program import TensorRtEngine, TensorRtProfile, TensorRtProgram


def list_tensorrt(program: TensorRtProgram, kv: KvLayout, tensor_bytes: Callable[[str], int]) -> Iterator[str]:
    """Yield the listing line by line; `tensor_bytes` gives the size of a plan tensor."""
    yield f"flavor {program.flavor}, products and attention in {program.half}"
    yield from _engine("model", program.model, tensor_bytes)
    if program.heads is not None:
        yield from _engine("heads", program.heads, tensor_bytes)
    for window in program.attention.windows:
        layers = [index for index, layer in enumerate(program.attention.layers) if layer.window == window.window]
        dtypes = ", ".join(dict.fromkeys(kv.dtype_of(index) for index in layers))
        reach = f"{window.window} tokens" if window.window else "the whole context"
        yield f"attention to {reach}: {len(layers)} layers, caches of {dtypes}"
    for name in dict.fromkeys(kernel.name for kernel in program.kernels):
        images = [kernel.architecture for kernel in program.kernels if kernel.name == name]
        yield f"kernel {name}: {', '.join(images)}"


def _engine(name: str, engine: TensorRtEngine, tensor_bytes: Callable[[str], int]) -> Iterator[str]:
    yield f"{name}: {engine.tensor}, {format_bytes(tensor_bytes(engine.tensor))}"
    for profile in engine.profiles:
        yield f"  {profile.name}: {_shapes(profile)}"


def _shapes(profile: TensorRtProfile) -> str:
    return ", ".join(
        f"{letter} {least} to {profile.largest[letter]} (most likely {profile.likely[letter]})"
        for letter, least in profile.smallest.items()
    )
