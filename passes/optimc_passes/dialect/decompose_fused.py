"""The dialect's fused operators in standard ONNX: what a graph was before they were found.

Each becomes the nodes an exporter would write, in the order it would write them, so that a graph computes the same bits
fused and unfused wherever a backend computes a node the same way twice. The names of values are kept.

Letters: T tokens, H query heads, Hkv key/value heads, D head dim, F frequencies, I features of a gate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx_ir as ir

from optimc_passes.dialect.add_rms_norm import ADD_RMS_NORM, AddRmsNorm
from optimc_passes.dialect.gated_activation import GATED_ACTIVATION, Activation, GatedActivation
from optimc_passes.dialect.paged_attention import DOMAIN
from optimc_passes.dialect.replacement import Prologue, Replacement, operand
from optimc_passes.dialect.rotary_qkv import ROTARY_QKV, RotaryQkv

Results = tuple[ir.Value, ...]
"""What takes the place of a node's outputs."""


def decompose_fused(model: ir.Model) -> ir.Model:
    """Return a copy without RotaryQkv, AddRmsNorm and GatedActivation; PagedAttention stays.

    The copy has the same inputs and outputs and shares the initializers' tensors.
    """
    model = model.clone()
    prologue = Prologue()
    batched: dict[ir.Value, ir.Value] = {}
    """Angles [T, F] to the same as [1, T, F], which all layers share."""
    for node in tuple(model.graph):
        if node.domain != DOMAIN or node.op_type not in DECOMPOSITIONS:
            continue
        replacement = Replacement(prologue)
        results = DECOMPOSITIONS[node.op_type](node, replacement, batched)
        replacement.name_after(node)
        replacement.put(model.graph, node, *results)
    prologue.insert(model)
    return model


def _add_rms_norm(node: ir.Node, new: Replacement, _batched: dict[ir.Value, ir.Value]) -> Results:
    x, residual, scale = (operand(node, index) for index in range(3))
    total = new.op("Add", x, residual)
    return total, _norm(new, total, scale, AddRmsNorm.from_node(node).epsilon)


def _gated_activation(node: ir.Node, new: Replacement, _batched: dict[ir.Value, ir.Value]) -> Results:
    gate, *up = (operand(node, index) for index in range(len(node.inputs)))
    if not up:
        gate, *up = new.halves(gate)
    activated = ACTIVATED[GatedActivation.from_node(node).activation](new, gate)
    return (new.op("Mul", activated, up[0]),)


ACTIVATED: Mapping[Activation, Callable[[Replacement, ir.Value], ir.Value]] = {
    "silu": lambda new, x: new.op("Mul", x, new.op("Sigmoid", x)),
    "gelu": lambda new, x: new.op("Gelu", x),
    "gelu_tanh": lambda new, x: new.op("Gelu", x, approximate="tanh"),
    "relu": lambda new, x: new.op("Relu", x),
    "sigmoid": lambda new, x: new.op("Sigmoid", x),
}
"""How each activation is written in ONNX."""


def _rotary_qkv(node: ir.Node, new: Replacement, batched: dict[ir.Value, ir.Value]) -> Results:
    spec = RotaryQkv.from_node(node)
    qkv, cos, sin, q_norm, k_norm = [*node.inputs, None, None, None, None][:5]
    assert qkv is not None, "verify_graph requires it"
    q, k, v = new.split(qkv, spec.widths)
    turned = []
    for rows, heads, scale in ((q, spec.num_heads, q_norm), (k, spec.num_kv_heads, k_norm)):
        if scale is not None:
            rows = _normed_heads(new, rows, scale, spec, heads)
        if cos is not None and sin is not None:
            tables = _batched(new, cos, batched), _batched(new, sin, batched)
            rows = _rotated(new, rows, tables, spec, heads)
        turned.append(rows)
    return *turned, v


def _batched(new: Replacement, angles: ir.Value, batched: dict[ir.Value, ir.Value]) -> ir.Value:
    """Return angles [T, F] as [1, T, F]."""
    if angles not in batched:
        batched[angles] = new.op("Unsqueeze", angles, new.ints(0))
    return batched[angles]


def _normed_heads(new: Replacement, rows: ir.Value, scale: ir.Value, spec: RotaryQkv, heads: int) -> ir.Value:
    """Norm [T, heads * D] by a scale [D] of each head or [heads * D] of the row."""
    assert scale.shape is not None, "parameters have shapes"
    if scale.shape[0] != spec.head_dim:
        return _norm(new, rows, scale, spec.epsilon)
    split = new.op("Reshape", rows, new.ints(0, heads, spec.head_dim))
    return new.op("Reshape", _norm(new, split, scale, spec.epsilon), new.ints(0, heads * spec.head_dim))


def _rotated(
    new: Replacement, rows: ir.Value, tables: tuple[ir.Value, ir.Value], spec: RotaryQkv, heads: int
) -> ir.Value:
    """Rotate [T, heads * D] by cosines and sines [1, T, F]."""
    attributes = {"num_heads": heads}
    if spec.rotary_dim != spec.head_dim:
        attributes["rotary_embedding_dim"] = spec.rotary_dim
    if spec.interleaved:
        attributes["interleaved"] = 1
    turned = new.op("RotaryEmbedding", new.op("Unsqueeze", rows, new.ints(0)), *tables, **attributes)
    return new.op("Squeeze", turned, new.ints(0))


def _norm(new: Replacement, x: ir.Value, scale: ir.Value, epsilon: float) -> ir.Value:
    return new.op("RMSNormalization", x, scale, axis=-1, epsilon=epsilon)


DECOMPOSITIONS: Mapping[str, Callable[[ir.Node, Replacement, dict[ir.Value, ir.Value]], Results]] = {
    ADD_RMS_NORM: _add_rms_norm,
    GATED_ACTIVATION: _gated_activation,
    ROTARY_QKV: _rotary_qkv,
}
"""Operator to what stands for it."""
