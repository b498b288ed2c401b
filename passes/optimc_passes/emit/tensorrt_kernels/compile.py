"""The kernels every TensorRT plan carries, compiled for the architectures it is to run on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from optimc_passes.emit.tensorrt_kernels.compile_source import (
    CompiledKernel,
    Specialization,
    capability_of,
    compile_source,
    import_triton,
)

_ROWS = Specialization(
    signature={"pool_ptrs": "*i64", "row_ptrs": "*i64", "row_bytes": "*i32", "slots": "*i64", "rows": "i32"},
    constants={"BLOCK_BYTES": 2048},
    num_warps=4,
)
"""A block is what 128 threads move at 16 bytes each: one key row of eight heads of 128 halves."""


def compile_kernels(architectures: Sequence[str]) -> list[CompiledKernel]:
    """Return `commit_rows`, `gather_rows` and `scatter_rows` for each architecture (`sm_80` …, or `ptx`).

    `scatter_rows` is `commit_rows` with a staging area as its source, and shares its image. Raises as `compile_source`;
    every architecture is looked at before anything is compiled.
    """
    for architecture in architectures:
        capability_of(architecture)
    import_triton()
    from optimc_passes.emit.tensorrt_kernels import row_kernels

    kernels = []
    for architecture in architectures:
        commit = compile_source("commit_rows", row_kernels.commit_rows, _ROWS, architecture)
        gather = compile_source("gather_rows", row_kernels.gather_rows, _ROWS, architecture)
        kernels += [commit, gather, replace(commit, name="scatter_rows")]
    return kernels
