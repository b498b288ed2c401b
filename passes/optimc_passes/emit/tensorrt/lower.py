"""Lowering to TensorRT: the graph becomes an engine, Medusa heads a second one, with our CUDA kernels beside them.

Operators that graph passes wrote are taken apart again: TensorRT fuses what it likes by itself, and merged products
(`merge_qkv`, `merge_gate_up`), whose weights are one matrix, stay merged.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from optimc.plan import PlanTensor
from optimc.plan.tensorrt_program import TensorRtEngine, TensorRtProfile, TensorRtProgram
from optimc_passes.choices import KvChoice
from optimc_passes.emit.heads_tensors import draft_vocab_tensors
from optimc_passes.emit.kv_layout import kv_layout
from optimc_passes.emit.lowered import Lowered, LoweringOptions
from optimc_passes.emit.tensorrt.flavor import FULL, flavor_of
from optimc_passes.emit.tensorrt.local_gpu import local_architecture
from optimc_passes.emit.tensorrt.network import DEFAULT_LEVEL, BuilderOptions, build_engine
from optimc_passes.emit.tensorrt.network_graph import network_graph
from optimc_passes.emit.tensorrt.options import precision_of, rounds_rows
from optimc_passes.emit.tensorrt.profiles import draft_profile, model_profiles
from optimc_passes.emit.tensorrt.timing_cache import timing_cache_path
from optimc_passes.emit.tensorrt_kernels.compile import compile_kernels
from optimc_passes.emit.tensorrt_kernels.compile_source import PTX
from optimc_passes.emit.tensorrt_kernels.plan_kernels import plan_kernels
from optimc_passes.heads.heads import Heads

MODEL_TENSOR = "program/model.engine"
HEADS_TENSOR = "program/heads.engine"
GPU = "gpu"
"""Requirement: architectures the engines run on, as `sm_80, sm_89`."""


def lower(
    model: ir.Model, options: LoweringOptions, kv: Sequence[KvChoice] = (), heads: Heads | None = None
) -> Lowered:
    """Lower a dialect graph with attached weights; `model` is not changed.

    `kv` says the cache's format layer by layer; without it `options.kv_dtype` is that of all layers, or, if that is
    None, what attention computes in. With `heads`, or `options.hidden`, the engine also answers what its output head
    multiplies. Engines are built here, weights are read on the way; files lie below `options.cache` meanwhile.

    Raises LoweringError naming a node TensorRT has no form or no kernel for, MissingExtraError for a package that is
    not installed, StorageError where files cannot be written.
    """
    assert options.max_seq_len is not None, "the model's configuration has been read"
    precision = precision_of(options)
    flavor = flavor_of(options.flavor)
    trt = flavor.load()
    architectures = (local_architecture(),) if flavor is FULL else options.gpu or flavor.architectures
    folder = options.cache or Path(tempfile.gettempdir())
    times = timing_cache_path(folder, trt.__version__, architectures[0]) if flavor is FULL else None
    level = DEFAULT_LEVEL if options.builder_level is None else options.builder_level
    builder = BuilderOptions(flavor, architectures, level, folder, times)

    layout = kv_layout(model, options.block_size, options.kv_dtype or precision, kv)
    network = network_graph(
        model,
        precision=precision,
        kv=layout,
        hidden=options.hidden or heads is not None,
        int8_rows=rounds_rows(options),
    )
    images, kernels = plan_kernels(compile_kernels((*architectures, PTX)))
    profiles = model_profiles(options.max_seqs, options.max_step_tokens, options.max_seq_len)
    tensors = [_engine_tensor(MODEL_TENSOR, build_engine(network.model, profiles, builder, trt)), *images]
    heads_engine = None
    if heads is not None:
        from optimc_passes.emit.tensorrt.heads_graph import heads_graph

        draft = (draft_profile(options.max_seqs),)
        engine = build_engine(heads_graph(heads, model, precision=precision), draft, builder, trt)
        tensors += [_engine_tensor(HEADS_TENSOR, engine), *draft_vocab_tensors(heads)]
        heads_engine = _engine(HEADS_TENSOR, draft)
    program = TensorRtProgram(
        flavor=flavor.name,
        half=precision,
        model=_engine(MODEL_TENSOR, profiles),
        attention=network.attention,
        hidden=network.hidden,
        heads=heads_engine,
        kernels=kernels,
    )
    requirements = {trt.__name__: f"=={trt.__version__}", GPU: ", ".join(architectures)}
    return Lowered(program.model_dump(mode="json"), tensors, requirements, layout)


def _engine(tensor: str, profiles: Sequence[TensorRtProfile]) -> TensorRtEngine:
    return TensorRtEngine(tensor=tensor, profiles=tuple(profiles))


def _engine_tensor(name: str, engine: NDArray[np.uint8]) -> PlanTensor:
    return PlanTensor(name, "U8", engine.shape, lambda: engine)
