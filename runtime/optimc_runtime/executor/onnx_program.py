"""The `program` section of a plan lowered for ONNX Runtime: names of tensors, inputs and outputs."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Initializer(_Section):
    """One weight: where the plan has it and what it is to ONNX."""

    tensor: str
    onnx_dtype: int
    """A TensorProto.DataType; 4-bit codes lie two per byte."""
    shape: tuple[int, ...]


class WindowPorts(_Section):
    """Inputs shared by all layers with the same window."""

    window: int
    context_slots: str
    """int64 [B, C]: pool row of each context token in reach."""
    mask: str
    """bool [B, Q, C + Q]: which keys each query sees."""


class LayerPorts(_Section):
    """One layer's cache, float32: pools [rows, Hkv*D] go in, this step's rows [T, Hkv*D] come out."""

    window: int
    key_pool: str
    value_pool: str
    step_keys: str
    step_values: str


class AttentionPorts(_Section):
    """What attention adds to the graph's inputs and outputs."""

    query_index: str
    """int64 [B, Q]: token of the step at each padded place."""
    unpad_index: str
    """int64 [T]: place of each token in the flattened [B * Q]."""
    windows: tuple[WindowPorts, ...]
    layers: tuple[LayerPorts, ...]


class OnnxHeads(_Section):
    """The Medusa heads: a model of their own, inputs "hidden" [N, d] and, if conditioned, "tokens" [N], output
    "logits" [N, K, V'], V' the draft vocabulary."""

    model: str
    """Plan tensor with the serialized model, weights absent."""
    initializers: dict[str, Initializer]


class OnnxProgram(_Section):
    """Everything the executor needs to find its way."""

    model: str
    """Plan tensor with the serialized model, weights absent."""
    initializers: dict[str, Initializer]
    attention: AttentionPorts
    int8_activations: bool
    """Whether fused quantized kernels may round activations to 8 bits."""
    hidden: str | None = None
    """The output [R, d] with what the output head multiplies, if there is one."""
    heads: OnnxHeads | None = None
