"""PagedAttention in standard ONNX, so that any backend can run it.

Two variants share one body of primitive operators (the `Attention` operator is avoided: backends disagree on the order
of soft cap and mask and on which of its inputs they honour):

- `decompose_causal`: one sequence, no cache, positions 0..T-1. Verification compares graphs in this form.
- `decompose_paged`: the pool is a read-only input, this step's K/V rows are outputs that the executor commits to
  their slots. Only attention is padded: sequences are gathered into [B, Q] for it and packed into [T] after it.

Letters: T tokens, B sequences, Q longest query, C longest context, H query heads, Hkv key/value heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from optimc_passes.dialect.decompose_fused import decompose_fused
from optimc_passes.dialect.paged_attention import PagedAttention, is_paged_attention
from optimc_passes.dialect.replacement import Prologue, Replacement, operand

QUERY_INDEX = "query_index"
UNPAD_INDEX = "unpad_index"


@dataclass(frozen=True, slots=True)
class WindowInputs:
    """Inputs shared by all layers with the same window."""

    window: int
    context_slots: str
    """Name of an int64 input [B, C]: pool row of each context token in the window's reach. Rows named here must hold
    finite numbers even where the mask hides them: NaN times a weight of 0 is NaN."""
    mask: str
    """Name of a bool input [B, Q, C + Q]: which keys (context, then this step) each query sees; at least one."""


@dataclass(frozen=True, slots=True)
class LayerPorts:
    """One layer's cache ports, all float32."""

    window: int
    key_pool: str
    """Input [rows, Hkv*D], one row per slot."""
    value_pool: str
    step_keys: str
    """Output [T, Hkv*D]: rows to be written to the step's slots."""
    step_values: str


@dataclass(frozen=True, slots=True)
class PagedPorts:
    """The graph inputs and outputs that `decompose_paged` adds."""

    query_index: str
    """int64 [B, Q]: token of the step at each padded place."""
    unpad_index: str
    """int64 [T]: place of each token in the flattened [B * Q]."""
    windows: tuple[WindowInputs, ...]
    """One per distinct window, ascending."""
    layers: tuple[LayerPorts, ...]
    """Indexed by layer."""


def decompose_causal(model: ir.Model) -> ir.Model:
    """Return a copy in which each PagedAttention attends causally over one sequence of T tokens at 0..T-1.

    The copy has the same inputs and outputs, shares the initializers' tensors, and imports standard ONNX only.
    """
    model = decompose_fused(model)
    graph = model.graph
    prologue = Prologue()
    masks: dict[int, ir.Value] = {}

    def visible(window: int) -> ir.Value:
        if window not in masks:
            tape = prologue.tape
            shape = tape.op("Shape", [_input(graph, "input_ids")])
            count = tape.op("Squeeze", [shape])
            zero, one = prologue.constant(np.array(0, np.int64)), prologue.constant(np.array(1, np.int64))
            positions = tape.op("Range", [zero, count, one])
            rows = tape.op("Unsqueeze", [positions, prologue.ints(1)])
            distance = tape.op("Sub", [rows, positions])
            mask = tape.op("GreaterOrEqual", [distance, zero])
            if window:
                inside = tape.op("Less", [distance, prologue.constant(np.array(window, np.int64))])
                mask = tape.op("And", [mask, inside])
            masks[window] = tape.op("Unsqueeze", [mask, prologue.ints(0, 1, 2)])
        return masks[window]

    for node in _attention_nodes(graph):
        spec = PagedAttention.from_node(node)
        body = Replacement(prologue)
        mask = visible(spec.window)
        q, k, v = (body.op("Unsqueeze", operand(node, i), body.ints(0)) for i in range(3))
        body.put(graph, node, body.op("Squeeze", write_attention(body, spec, q, k, v, mask), body.ints(0)))
    prologue.insert(model)
    return model


def decompose_paged(model: ir.Model) -> tuple[ir.Model, PagedPorts]:
    """Return a copy in which each PagedAttention reads the pool, with the ports that were added to the graph."""
    model = decompose_fused(model)
    graph = model.graph
    nodes = _attention_nodes(graph)
    specs = [PagedAttention.from_node(node) for node in nodes]
    prologue = Prologue()
    query_index = _add_input(graph, QUERY_INDEX, ir.DataType.INT64, ("B", "Q"))
    unpad_index = _add_input(graph, UNPAD_INDEX, ir.DataType.INT64, ("T",))
    windows: dict[int, tuple[WindowInputs, ir.Value, ir.Value]] = {}
    for window in sorted({spec.window for spec in specs}):
        suffix = f"_window_{window}" if window else ""
        names = WindowInputs(window, f"context_slots{suffix}", f"mask{suffix}")
        context = _add_input(graph, names.context_slots, ir.DataType.INT64, ("B", f"C{suffix}"))
        mask = _add_input(graph, names.mask, ir.DataType.BOOL, ("B", "Q", f"K{suffix}"))
        windows[window] = names, context, prologue.tape.op("Unsqueeze", [mask, prologue.ints(1, 2)])
    layers: dict[int, LayerPorts] = {}
    for node, spec in zip(nodes, specs, strict=True):
        ports = LayerPorts(
            spec.window,
            f"key_pool_{spec.layer}",
            f"value_pool_{spec.layer}",
            f"step_keys_{spec.layer}",
            f"step_values_{spec.layer}",
        )
        layers[spec.layer] = ports
        _, context, visible = windows[spec.window]
        body = Replacement(prologue)
        seen: list[ir.Value] = []
        for written, pool_name, step_name in (
            (operand(node, 1), ports.key_pool, ports.step_keys),
            (operand(node, 2), ports.value_pool, ports.step_values),
        ):
            pool = _add_input(graph, pool_name, ir.DataType.FLOAT, ("rows", spec.kv_width))
            past = body.op("Gather", pool, context, axis=0)
            present = body.op("Gather", written, query_index, axis=0)
            seen.append(body.op("Concat", past, present, axis=1))
            step = body.op("Identity", written)
            step.name, step.dtype, step.shape = step_name, ir.DataType.FLOAT, ir.Shape(["T", spec.kv_width])
            graph.outputs.append(step)
        q = body.op("Gather", operand(node, 0), query_index, axis=0)
        attended = write_attention(body, spec, q, seen[0], seen[1], visible)
        padded = body.op("Reshape", attended, body.ints(-1, spec.q_width))
        body.put(graph, node, body.op("Gather", padded, unpad_index, axis=0))
    prologue.insert(model)
    ports_by_layer = tuple(layers[layer] for layer in sorted(layers))
    return model, PagedPorts(QUERY_INDEX, UNPAD_INDEX, tuple(entry[0] for entry in windows.values()), ports_by_layer)


def write_attention(
    body: Replacement, spec: PagedAttention, q: ir.Value, keys: ir.Value, values: ir.Value, visible: ir.Value
) -> ir.Value:
    """Add nodes that attend: [B, Q, H*D] from q [B, Q, H*D], keys and values [B, K, Hkv*D], visible [B, 1, 1, Q, K].

    `visible` is bool; a row of it without a True gives NaN.
    """
    heads, group, dim = spec.num_kv_heads, spec.num_heads // spec.num_kv_heads, spec.head_dim

    def split_heads(packed: ir.Value, split: tuple[int, int, int], perm: Sequence[int]) -> ir.Value:
        """Split the last axis of [B, X, width] into three and reorder the five axes."""
        return body.op("Transpose", body.op("Reshape", packed, body.ints(0, 0, *split)), perm=perm)

    scaled = body.op("Mul", q, body.scalar(spec.scale))
    # Query heads stay grouped by the K/V head they share, so that K/V broadcast instead of being repeated.
    q_heads = split_heads(scaled, (heads, group, dim), perm=[0, 2, 3, 1, 4])
    k_heads = split_heads(keys, (heads, 1, dim), perm=[0, 2, 3, 4, 1])
    v_heads = split_heads(values, (heads, 1, dim), perm=[0, 2, 3, 1, 4])
    scores = body.op("MatMul", q_heads, k_heads)
    if spec.softcap:
        cap = body.scalar(spec.softcap)
        scores = body.op("Mul", body.op("Tanh", body.op("Div", scores, cap)), cap)
    masked = body.op("Where", visible, scores, body.scalar(-np.inf))
    mixed = body.op("MatMul", body.op("Softmax", masked, axis=-1), v_heads)
    return body.op("Reshape", body.op("Transpose", mixed, perm=[0, 3, 1, 2, 4]), body.ints(0, 0, spec.q_width))


def _attention_nodes(graph: ir.Graph) -> list[ir.Node]:
    return [node for node in graph if is_paged_attention(node)]


def _input(graph: ir.Graph, name: str) -> ir.Value:
    return next(value for value in graph.inputs if value.name == name)


def _add_input(graph: ir.Graph, name: str, dtype: ir.DataType, shape: tuple[str | int, ...]) -> ir.Value:
    value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
    graph.inputs.append(value)
    return value
