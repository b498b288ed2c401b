"""Lowering to ONNX Runtime: the portable reference target.

The plan holds the graph in standard ONNX (PagedAttention decomposed, weights absent) and each weight as a tensor of its
own, which ONNX Runtime maps from the plan file. Quantized linears stay DequantizeLinear -> MatMul, which ONNX Runtime
fuses into one kernel (MatMulNBits) for 4 and 8 bits and blocks of a power of two, and computes as written otherwise.
Activations stay float32, so quality figures show what the weights lost and nothing else; `int8_activations` lets the
fused kernels round activations to 8 bits per block, which is faster and measurably less accurate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import LiftConstantsToInitializersPass, RemoveUnusedNodesPass

from optimc.plan import PlanTensor
from optimc_passes.dialect.decompose import PagedPorts, decompose_paged
from optimc_passes.dialect.weightless import INLINE_BYTES, is_weight
from optimc_passes.emit.heads_tensors import draft_vocab_tensors
from optimc_passes.emit.kernel_check import check_kernels
from optimc_passes.emit.kv_layout import kv_layout
from optimc_passes.emit.lowered import Lowered, LoweringOptions
from optimc_passes.emit.onnx_heads import PREFIX, heads_model
from optimc_passes.emit.onnx_hidden import HIDDEN, add_hidden_output, find_head
from optimc_passes.emit.tensorrt_options import refuse_tensorrt_options
from optimc_passes.emit.transposed_linear import read_transposed_weights_in_place
from optimc_passes.heads.heads import Heads
from optimc_passes.load.safetensors_file import NUMPY_DTYPES

BACKEND = "onnxruntime"
VERSION = 1
MINIMUM_VERSION = "1.23"
"""The first ONNX Runtime with all of opset 23 and the 8-bit fused kernel."""

MODEL_TENSOR = "program/model.onnx"
HEADS_TENSOR = "program/heads.onnx"

_CONTAINER_DTYPES = {ir.DataType.from_numpy(dtype): name for name, dtype in NUMPY_DTYPES.items()}


def check_options(options: LoweringOptions) -> dict[str, str]:
    """Return why each option this target refuses is refused, by the option's name."""
    refused = refuse_tensorrt_options(options, BACKEND)
    if options.activation_scales != "group":
        refused["activation_scales"] = (
            f"the {BACKEND} target has no scales per {options.activation_scales}; its fused kernels have one per group"
        )
    if options.kv_dtype not in (None, "float32"):
        refused["kv_dtype"] = f"the {BACKEND} target keeps keys and values in float32 only, not {options.kv_dtype}"
    return refused


def lower(
    model: ir.Model,
    *,
    block_size: int,
    int8_activations: bool = False,
    hidden: bool = False,
    heads: Heads | None = None,
) -> Lowered:
    """Lower a dialect graph with attached weights; `model` is not changed.

    `block_size` is S, the slots per KV block. With `hidden`, or with `heads`, the graph also answers what its output
    head multiplies.

    Raises LoweringError naming a node ONNX Runtime has no kernel for, and for hidden states or heads where the output
    head cannot be found.
    """
    kv = kv_layout(model, block_size, "float32")
    lowered, ports = decompose_paged(model)
    drafting = None
    if hidden or heads is not None:
        head = find_head(lowered.graph)
        drafting = None if heads is None else heads_model(heads, lowered, head)
        add_hidden_output(lowered, head)
    proto, weights = _finished(lowered)
    program: dict[str, Any] = {
        "model": MODEL_TENSOR,
        "initializers": _describe_weights({name: f"weights/{name}" for name in weights}, weights),
        "attention": _describe(ports),
        "int8_activations": int8_activations,
    }
    tensors = [PlanTensor.from_bytes(MODEL_TENSOR, proto)]
    tensors += [_plan_tensor(f"weights/{name}", tensor) for name, tensor in weights.items()]
    if hidden or heads is not None:
        program["hidden"] = HIDDEN
    if heads is not None and drafting is not None:
        proto, own = _finished(drafting)
        # What the heads share with the model lies in the plan once, unless the model stores it in another form.
        places = {name: f"weights/{name}" if weights.get(name) is own[name] else _own(name) for name in own}
        program["heads"] = {"model": HEADS_TENSOR, "initializers": _describe_weights(places, own)}
        tensors.append(PlanTensor.from_bytes(HEADS_TENSOR, proto))
        tensors += [
            _plan_tensor(place, own[name]) for name, place in places.items() if not place.startswith("weights/")
        ]
        tensors += draft_vocab_tensors(heads)
    return Lowered(program, tensors, {"onnxruntime": f">={MINIMUM_VERSION}"}, kv)


def _finished(model: ir.Model) -> tuple[bytes, dict[str, ir.TensorProtocol]]:
    """Make a graph what ONNX Runtime is to run, in place; return its bytes, and its weights by name."""
    read_transposed_weights_in_place(model)
    LiftConstantsToInitializersPass(size_limit=INLINE_BYTES // 8)(model)
    RemoveUnusedNodesPass()(model)
    check_kernels(model)
    weights = _take_weights(model.graph)
    return ir.to_proto(model).SerializeToString(deterministic=True), weights


def _describe_weights(places: dict[str, str], weights: dict[str, ir.TensorProtocol]) -> dict[str, Any]:
    return {
        name: {"tensor": place, "onnx_dtype": int(weights[name].dtype), "shape": list(weights[name].shape.numpy())}
        for name, place in places.items()
    }


def _own(name: str) -> str:
    return name if name.startswith(PREFIX) else f"{PREFIX}{name}"


def _describe(ports: PagedPorts) -> dict[str, Any]:
    """Return the ports as JSON values, for the executor to find its inputs and outputs by name."""
    described = asdict(ports)
    return {**described, "windows": list(described["windows"]), "layers": list(described["layers"])}


def _take_weights(graph: ir.Graph) -> dict[str, ir.TensorProtocol]:
    """Remove the weights from the graph and return them by name. Small constants stay."""
    weights = {}
    for name, value in tuple(graph.initializers.items()):
        assert value.const_value is not None
        if is_weight(value.const_value):
            weights[name] = value.const_value
            del graph.initializers[name]
    return weights


def _plan_tensor(name: str, tensor: ir.TensorProtocol) -> PlanTensor:
    shape = tuple(tensor.shape.numpy())
    if tensor.dtype.bitwidth == 4:
        packed = (-(-math.prod(shape) // 2),)
        return PlanTensor(name, "U8", packed, _packed_bytes(tensor))
    return PlanTensor(name, _CONTAINER_DTYPES[tensor.dtype], shape, tensor.numpy)


def _packed_bytes(tensor: ir.TensorProtocol) -> Callable[[], NDArray[Any]]:
    """Two codes per byte, the first in the low half: ONNX's own layout."""
    return lambda: np.frombuffer(tensor.tobytes(), np.uint8)
