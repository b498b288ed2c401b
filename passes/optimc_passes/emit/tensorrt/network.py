"""From an ONNX graph to a serialized engine, through TensorRT's parser and builder.

Weights are handed over by address, the engine is streamed to a file without a name: beside what TensorRT itself
allocates, which is one to two and a half times the engine, memory holds what the system has room for.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from optimc.errors import LoweringError, StorageError
from optimc.plan.tensorrt_program import TensorRtProfile
from optimc.storage import storing
from optimc_passes.dialect.weightless import is_weight
from optimc_passes.emit.tensorrt.culprit import build_problem
from optimc_passes.emit.tensorrt.engine_writer import writer_class
from optimc_passes.emit.tensorrt.flavor import RTX, TensorRt
from optimc_passes.emit.tensorrt.interruption import holding_interrupts, monitor_class
from optimc_passes.emit.tensorrt.messages import Messages, listen
from optimc_passes.emit.tensorrt.profiles import input_shapes
from optimc_passes.emit.tensorrt.timing_cache import keep_timing_cache, use_timing_cache
from optimc_passes.emit.tensorrt.unused_inputs import refuse_unused_inputs
from optimc_passes.emit.tensorrt.weight_file import StoredWeight, stored_weights

DEFAULT_LEVEL = 3
"""TensorRT's own choice between time to build and time to run."""


@dataclass(frozen=True)
class BuilderOptions:
    """How engines are built."""

    flavor: TensorRt
    architectures: tuple[str, ...]
    """GPUs the engine is for: `sm_89` and so on; one, that of this machine, for full TensorRT."""
    level: int
    """0 to 5; not looked at by TensorRT-RTX, which chooses kernels where the plan is served."""
    folder: Path
    """For weights and engine while they are built; what lies there has no name and is gone with the process."""
    timing_cache: Path | None
    """None for TensorRT-RTX."""


def build_engine(
    model: ir.Model, profiles: Sequence[TensorRtProfile], options: BuilderOptions, trt: ModuleType
) -> NDArray[np.uint8]:
    """Return the engine's bytes, mapped from a file that lives as long as they do; `model` is not changed.

    `trt` is the module of `options.flavor`. Each weight is read once.

    Raises LoweringError naming the node TensorRT does not understand or cannot build, and for inputs nothing reads;
    StorageError where files cannot be written.
    """
    graph = model.graph
    refuse_unused_inputs(graph)
    proto, weights = _without_data(model)
    with storing("an engine", options.folder):
        options.folder.mkdir(parents=True, exist_ok=True)
    with (
        stored_weights(weights, options.folder) as places,
        listen(trt) as (logger, messages),
        holding_interrupts() as interrupted,
    ):
        builder = trt.Builder(logger)
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        parser = trt.OnnxParser(network, logger)
        refused = _parse(parser, proto, places)
        if refused is not None:
            raise LoweringError(build_problem(graph, options.flavor.title, [*refused, *messages.errors]))
        config = _configured(builder, graph, profiles, options, trt)
        monitor = monitor_class(trt)(interrupted)  # which must live as long as the configuration
        config.progress_monitor = monitor
        engine = _serialized(trt, builder, network, config, options.folder)
        if engine is None:
            raise LoweringError(build_problem(graph, options.flavor.title, messages.errors))
        _refuse_ignored(messages)
        if options.timing_cache is not None:
            keep_timing_cache(config, options.timing_cache)
        return engine


def _without_data(model: ir.Model) -> tuple[bytes, dict[str, ir.TensorProtocol]]:
    """Return the graph with weights declared and their bytes left out, and the weights by name."""
    model = model.clone()
    weights = {}
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        assert tensor is not None
        if is_weight(tensor):
            weights[name] = tensor
            value.const_value = ir.ExternalTensor(
                "given", 0, 0, tensor.dtype, shape=ir.Shape(tensor.shape.numpy()), name=name
            )
    return ir.to_proto(model).SerializeToString(), weights


def _parse(parser: Any, proto: bytes, places: dict[str, StoredWeight]) -> list[str] | None:
    """Hand over the graph, then the weights; return what the parser objects to, None if nothing."""
    if parser.load_model_proto(proto):
        refused = [
            f"weight {name} of {place.nbytes} bytes is not taken"
            for name, place in places.items()
            if not parser.load_initializer(name, place.address, place.nbytes)
        ]
        if refused:
            return refused[:1]
        if parser.parse_model_proto():
            return None
    errors = [parser.get_error(index) for index in range(parser.num_errors)]
    # The node's name in front where it is known: texts may name other nodes first.
    return [f"{error.node_name()}: {error.desc()}" if error.node_name() else error.desc() for error in errors]


def _configured(
    builder: Any, graph: ir.Graph, profiles: Sequence[TensorRtProfile], options: BuilderOptions, trt: ModuleType
) -> Any:
    config = builder.create_builder_config()
    # Names only: detailed engines carry every layer's parameters as text.
    config.profiling_verbosity = trt.ProfilingVerbosity.LAYER_NAMES_ONLY
    for profile in profiles:
        built_for = builder.create_optimization_profile()
        for value in graph.inputs:
            assert value.shape is not None, value.name
            dims = tuple(dim if isinstance(dim, int) else str(dim.value) for dim in value.shape)
            built_for.set_shape(value.name, *input_shapes(dims, profile))
        config.add_optimization_profile(built_for)
    if options.flavor is RTX:
        config.num_compute_capabilities = len(options.architectures)
        for index, architecture in enumerate(options.architectures):
            capability = getattr(trt.ComputeCapability, architecture.replace("_", "").upper())
            config.set_compute_capability(capability, index)
        # Steps are captured as CUDA graphs, and what is captured must not allocate.
        config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
    else:
        config.builder_optimization_level = options.level
    if options.timing_cache is not None:
        use_timing_cache(config, options.timing_cache)
    return config


def _serialized(trt: ModuleType, builder: Any, network: Any, config: Any, folder: Path) -> NDArray[np.uint8] | None:
    """Return the engine mapped from a file below `folder`; None if there is none. Raises StorageError."""
    with storing("an engine", folder):
        file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - it goes with the mapping
    writer = writer_class(trt)(file)
    built = builder.build_serialized_network_to_stream(network, config, writer)
    if writer.failure is not None:
        raise StorageError(f"an engine cannot be written to {folder}: {writer.failure}") from writer.failure
    if not built:
        return None
    with storing("an engine", folder):
        file.flush()
    return np.memmap(file, np.uint8, "r")


def _refuse_ignored(messages: Messages) -> None:
    """TensorRT may find inputs useless that the graph reads, where it computes their use away."""
    unused = [text for text in messages.warnings if text.startswith("Unused Input")]
    if unused:
        raise LoweringError(f"TensorRT needs not all inputs of the graph: {'; '.join(unused)}")
