"""Compiled kernels as a plan holds them."""

from __future__ import annotations

from collections.abc import Iterable

from optimc.plan import PlanTensor
from optimc.plan.tensorrt_program import TensorRtKernel
from optimc_passes.emit.tensorrt_kernels.compile_source import CompiledKernel


def plan_kernels(kernels: Iterable[CompiledKernel]) -> tuple[list[PlanTensor], tuple[TensorRtKernel, ...]]:
    """Return the images as tensors `kernels/NAME.ARCHITECTURE`, each once, and an entry for each kernel.

    Kernels that share an image share the tensor named after the first of them.
    """
    names: dict[bytes, str] = {}
    entries = []
    for kernel in kernels:
        entries.append(
            TensorRtKernel(
                name=kernel.name,
                architecture=kernel.architecture,
                tensor=names.setdefault(kernel.image, f"kernels/{kernel.name}.{kernel.architecture}"),
                function=kernel.function,
                num_warps=kernel.num_warps,
                shared_bytes=kernel.shared_bytes,
                arguments=kernel.arguments,
            )
        )
    return [PlanTensor.from_bytes(name, image) for image, name in names.items()], tuple(entries)
