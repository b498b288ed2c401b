"""Paged attention as plugins of full TensorRT, their PTX embedded in the engine: no Python and no Triton at run time.

A network names them by ONNX nodes with the operator type `AttentionPlugins` gives, the attributes NODE_ATTRIBUTES, and
inputs and outputs as `plugin_design` lists them; they must be registered before the network is parsed.

Never executed, for want of a GPU and of full TensorRT on this machine: everything TensorRT does with these functions.
They were only called by a stand-in for `tensorrt.plugin` that checks signatures as NVIDIA's published Python sources do
and evaluates symbols as integers. In particular nobody has seen yet
- the ONNX parser find the plugins, by `plugin_namespace` and `aot`;
- TensorRT take int8 and fp8 tensors without scales of its own, bool and int64 inputs, and a pool of gigabytes;
- two tactics timed and one kept for each optimization profile (NVIDIA's sample has done so since May 2026);
- kernels launched with dynamic shared memory. Whether TensorRT asks the driver for more than the 48 KB a launch gets
  unasked is not documented: the tiles keep within it;
- the edited PTX (see `strip_hidden_pointers`) run; ptxas assembles it.
"""

from __future__ import annotations

import importlib
import inspect
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from optimc_passes.emit.tensorrt_kernels import plugin_design as design
from optimc_passes.emit.tensorrt_kernels.attention_tiles import Purpose
from optimc_passes.emit.tensorrt_kernels.attention_variant import AttentionVariant
from optimc_passes.emit.tensorrt_kernels.compile_attention import (
    TiledKernel,
    compile_attention,
    compile_merge,
    refuse,
)
from optimc_passes.emit.tensorrt_kernels.compile_source import CompiledKernel
from optimc_passes.emit.tensorrt_kernels.strip_hidden_pointers import strip_hidden_pointers

NODE_ATTRIBUTES: dict[str, str | int] = {"plugin_namespace": design.NAMESPACE, "plugin_version": "1", "aot": 1}
"""Attributes by which TensorRT's ONNX parser finds a plugin and takes its ahead-of-time form."""

SHARED_BYTES = 49152
"""What every launch may use without asking the driver for more."""

_TACTICS: dict[int, Purpose] = {1: "decode", 2: "prefill"}
"""TensorRT times both for each profile. Its numbers for tactics of one's own are positive."""


@dataclass(frozen=True)
class AttentionPlugins:
    """Operator types of the two nodes a layer's attention becomes."""

    attention: str
    merge: str


def find_plugin_module() -> Any | None:
    """Return `tensorrt.plugin` if there is one that takes ahead-of-time kernels; None otherwise."""
    try:
        module = importlib.import_module("tensorrt.plugin")
    except ImportError:
        return None
    return module if hasattr(module, "aot_impl") and hasattr(module, "KernelLaunchParams") else None


def register_attention(trt: Any, trtp: Any, variant: AttentionVariant, capability: int) -> AttentionPlugins:
    """Compile a variant's kernels for a GPU and register them as plugins of `trt`, TensorRT, whose `plugin` is `trtp`.

    Does nothing for plugins that are registered already. Raises as `compile_attention`.
    """
    names = AttentionPlugins(*design.plugin_names(variant, capability))
    if hasattr(getattr(trtp.op, design.NAMESPACE, None), names.attention):
        return names
    architecture = f"ptx_{capability}"
    refuse(variant, architecture, "attention")
    kernels = {
        tactic: compile_attention(
            names.attention, variant, purpose, architecture, split=True, shared_limit=SHARED_BYTES
        )
        for tactic, purpose in _TACTICS.items()
    }
    merge = compile_merge(names.merge, variant, architecture)
    _register_split(trt, trtp, names.attention, variant, kernels)
    _register_merge(trt, trtp, names.merge, variant, merge)
    return names


def _register_split(
    trt: Any,
    trtp: Any,
    name: str,
    variant: AttentionVariant,
    kernels: dict[int, TiledKernel],
) -> None:
    inputs = design.attention_inputs(variant)

    def describe(*tensors: Any) -> Any:
        shapes = design.attention_shapes(variant, _sizes(inputs, tensors))
        return tuple(trtp.from_shape_expr(shape, trt.float32) for shape in shapes)

    def launch(*arguments: Any) -> Any:
        *tensors, _, tactic = arguments
        chosen = kernels[tactic]
        return _answer(trtp, chosen.kernel, design.attention_launch(variant, chosen.tile, _sizes(inputs, tensors)))

    io_types = [*inputs.values(), *design.ATTENTION_OUTPUTS.values()]
    _decorate(trtp, name, list(inputs), describe, launch, num_outputs=2, io_types=io_types, tactics=list(_TACTICS))


def _register_merge(trt: Any, trtp: Any, name: str, variant: AttentionVariant, kernel: CompiledKernel) -> None:
    inputs = design.ATTENTION_OUTPUTS
    half = trt.bfloat16 if variant.half == "bfloat16" else trt.float16

    def describe(parts: Any, _log_sums: Any) -> Any:
        return (trtp.from_shape_expr((parts.shape_expr[1], parts.shape_expr[2]), half),)

    def launch(*arguments: Any) -> Any:
        *tensors, _, _tactic = arguments
        return _answer(trtp, kernel, design.merge_launch(variant, _sizes(inputs, tensors)))

    io_types = [*inputs.values(), *design.merge_outputs(variant).values()]
    _decorate(trtp, name, list(inputs), describe, launch, num_outputs=1, io_types=io_types, tactics=[1])


def _decorate(
    trtp: Any,
    name: str,
    inputs: list[str],
    describe: Callable[..., Any],
    launch: Callable[..., Any],
    *,
    num_outputs: int,
    io_types: list[design.PluginType],
    tactics: list[int],
) -> None:
    """Register one plugin. TensorRT reads names and types of arguments off the functions' signatures."""
    plugin_id = f"{design.NAMESPACE}::{name}"
    describes = types.GenericAlias(tuple, (trtp.TensorDesc,) * num_outputs)
    launches = types.GenericAlias(tuple, (str, str, trtp.KernelLaunchParams, trtp.SymIntExprs))

    def combinations(*_arguments: Any) -> Any:
        return [trtp.AutoTuneCombination(", ".join(io_types), "LINEAR", tactics)]

    trtp.register(plugin_id)(_signed(describe, inputs, describes, annotation=trtp.TensorDesc))
    trtp.autotune(plugin_id)(
        _signed(combinations, [*inputs, "outputs"], types.GenericAlias(list, trtp.AutoTuneCombination))
    )
    trtp.aot_impl(plugin_id)(_signed(launch, [*inputs, "outputs", "tactic"], launches))


def _signed(
    function: Callable[..., Any], names: Iterable[str], returns: Any, annotation: Any = inspect.Parameter.empty
) -> Callable[..., Any]:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind, annotation=annotation) for name in names]
    function.__signature__ = inspect.Signature(parameters, return_annotation=returns)  # type: ignore[attr-defined]
    return function


def _sizes(names: Iterable[str], tensors: Iterable[Any]) -> design.Sizes:
    return {name: tensor.shape_expr for name, tensor in zip(names, tensors, strict=True)}


def _answer(trtp: Any, kernel: CompiledKernel, launch: design.Launch) -> tuple[str, str, Any, Any]:
    grid_x, grid_y, grid_z = launch.grid
    where = trtp.KernelLaunchParams(
        grid_x=grid_x,
        grid_y=grid_y,
        grid_z=grid_z,
        block_x=32 * kernel.num_warps,
        shared_mem=kernel.shared_bytes,
    )
    extra = trtp.SymIntExprs.from_tuple([trtp.SymInt32(size) for size in launch.extra])
    ptx = strip_hidden_pointers(kernel.image.rstrip(b"\0").decode())
    return kernel.function, ptx, where, extra
