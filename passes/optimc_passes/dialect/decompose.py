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
from onnx_ir.tape import Tape

from optimc_passes.dialect.paged_attention import DOMAIN, PagedAttention, is_paged_attention

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


class _Body:
    """Records the nodes that replace one PagedAttention node."""

    def __init__(self, constants: dict[str, ir.Value], constant_tape: Tape) -> None:
        self.tape = Tape()
        self._constants = constants
        self._constant_tape = constant_tape

    def op(self, op_type: str, *inputs: ir.Value, **attributes: int | float | Sequence[int]) -> ir.Value:
        return self.tape.op(op_type, inputs, attributes)

    def constant(self, array: np.ndarray) -> ir.Value:
        """Return a constant; equal ones are shared across layers."""
        key = f"{array.dtype}{array.shape}{array.tolist()}"
        if key not in self._constants:
            self._constants[key] = self._constant_tape.op("Constant", (), {"value": ir.tensor(array)})
        return self._constants[key]

    def ints(self, *values: int) -> ir.Value:
        return self.constant(np.array(values, np.int64))

    def scalar(self, value: float) -> ir.Value:
        return self.constant(np.array(value, np.float32))

    def attend(
        self, spec: PagedAttention, q: ir.Value, keys: ir.Value, values: ir.Value, visible: ir.Value
    ) -> ir.Value:
        """Return [B, Q, H*D] from q [B, Q, H*D], keys and values [B, K, Hkv*D], visible bool [B, 1, 1, Q, K]."""
        heads, group, dim = spec.num_kv_heads, spec.num_heads // spec.num_kv_heads, spec.head_dim
        scaled = self.op("Mul", q, self.scalar(spec.scale))
        # Query heads stay grouped by the K/V head they share, so that K/V broadcast instead of being repeated.
        q_heads = self._heads(scaled, (heads, group, dim), perm=[0, 2, 3, 1, 4])
        k_heads = self._heads(keys, (heads, 1, dim), perm=[0, 2, 3, 4, 1])
        v_heads = self._heads(values, (heads, 1, dim), perm=[0, 2, 3, 1, 4])
        scores = self.op("MatMul", q_heads, k_heads)
        if spec.softcap:
            cap = self.scalar(spec.softcap)
            scores = self.op("Mul", self.op("Tanh", self.op("Div", scores, cap)), cap)
        masked = self.op("Where", visible, scores, self.scalar(-np.inf))
        mixed = self.op("MatMul", self.op("Softmax", masked, axis=-1), v_heads)
        return self.op("Reshape", self.op("Transpose", mixed, perm=[0, 3, 1, 2, 4]), self.ints(0, 0, spec.q_width))

    def _heads(self, packed: ir.Value, split: tuple[int, int, int], perm: Sequence[int]) -> ir.Value:
        """Split the last axis of [B, X, width] into three and reorder the five axes."""
        return self.op("Transpose", self.op("Reshape", packed, self.ints(0, 0, *split)), perm=perm)


def decompose_causal(model: ir.Model) -> ir.Model:
    """Return a copy in which each PagedAttention attends causally over one sequence of T tokens at 0..T-1.

    The copy has the same inputs and outputs, shares the initializers' tensors, and imports standard ONNX only.
    """
    model = model.clone()
    graph = model.graph
    constants: dict[str, ir.Value] = {}
    prologue = Tape()
    masks: dict[int, ir.Value] = {}

    def visible(body: _Body, window: int) -> ir.Value:
        if window not in masks:
            shape = prologue.op("Shape", [_input(graph, "input_ids")])
            count = prologue.op("Squeeze", [shape])
            zero, one = body.constant(np.array(0, np.int64)), body.constant(np.array(1, np.int64))
            positions = prologue.op("Range", [zero, count, one])
            rows = prologue.op("Unsqueeze", [positions, body.ints(1)])
            distance = prologue.op("Sub", [rows, positions])
            mask = prologue.op("GreaterOrEqual", [distance, zero])
            if window:
                inside = prologue.op("Less", [distance, body.constant(np.array(window, np.int64))])
                mask = prologue.op("And", [mask, inside])
            masks[window] = prologue.op("Unsqueeze", [mask, body.ints(0, 1, 2)])
        return masks[window]

    for node in _attention_nodes(graph):
        spec = PagedAttention.from_node(node)
        body = _Body(constants, prologue)
        mask = visible(body, spec.window)
        q, k, v = (body.op("Unsqueeze", _operand(node, i), body.ints(0)) for i in range(3))
        _replace(graph, node, body, body.op("Squeeze", body.attend(spec, q, k, v, mask), body.ints(0)))
    _finish(model, prologue)
    return model


def decompose_paged(model: ir.Model) -> tuple[ir.Model, PagedPorts]:
    """Return a copy in which each PagedAttention reads the pool, with the ports that were added to the graph."""
    model = model.clone()
    graph = model.graph
    nodes = _attention_nodes(graph)
    specs = [PagedAttention.from_node(node) for node in nodes]
    constants: dict[str, ir.Value] = {}
    prologue = Tape()
    query_index = _add_input(graph, QUERY_INDEX, ir.DataType.INT64, ("B", "Q"))
    unpad_index = _add_input(graph, UNPAD_INDEX, ir.DataType.INT64, ("T",))
    windows: dict[int, tuple[WindowInputs, ir.Value, ir.Value]] = {}
    for window in sorted({spec.window for spec in specs}):
        suffix = f"_window_{window}" if window else ""
        names = WindowInputs(window, f"context_slots{suffix}", f"mask{suffix}")
        context = _add_input(graph, names.context_slots, ir.DataType.INT64, ("B", f"C{suffix}"))
        mask = _add_input(graph, names.mask, ir.DataType.BOOL, ("B", "Q", f"K{suffix}"))
        windows[window] = names, context, prologue.op("Unsqueeze", [mask, _Body(constants, prologue).ints(1, 2)])
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
        body = _Body(constants, prologue)
        seen: list[ir.Value] = []
        for operand, pool_name, step_name in (
            (_operand(node, 1), ports.key_pool, ports.step_keys),
            (_operand(node, 2), ports.value_pool, ports.step_values),
        ):
            pool = _add_input(graph, pool_name, ir.DataType.FLOAT, ("rows", spec.kv_width))
            past = body.op("Gather", pool, context, axis=0)
            present = body.op("Gather", operand, query_index, axis=0)
            seen.append(body.op("Concat", past, present, axis=1))
            step = body.op("Identity", operand)
            step.name, step.dtype, step.shape = step_name, ir.DataType.FLOAT, ir.Shape(["T", spec.kv_width])
            graph.outputs.append(step)
        q = body.op("Gather", _operand(node, 0), query_index, axis=0)
        padded = body.op("Reshape", body.attend(spec, q, seen[0], seen[1], visible), body.ints(-1, spec.q_width))
        _replace(graph, node, body, body.op("Gather", padded, unpad_index, axis=0))
    _finish(model, prologue)
    ports_by_layer = tuple(layers[layer] for layer in sorted(layers))
    return model, PagedPorts(QUERY_INDEX, UNPAD_INDEX, tuple(entry[0] for entry in windows.values()), ports_by_layer)


def _attention_nodes(graph: ir.Graph) -> list[ir.Node]:
    return [node for node in graph if is_paged_attention(node)]


def _operand(node: ir.Node, index: int) -> ir.Value:
    value = node.inputs[index]
    assert value is not None, "verify_graph requires q, k and v"
    return value


def _input(graph: ir.Graph, name: str) -> ir.Value:
    return next(value for value in graph.inputs if value.name == name)


def _add_input(graph: ir.Graph, name: str, dtype: ir.DataType, shape: tuple[str | int, ...]) -> ir.Value:
    value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
    graph.inputs.append(value)
    return value


def _replace(graph: ir.Graph, node: ir.Node, body: _Body, result: ir.Value) -> None:
    """Put the body where the node was; `result` takes over the name, type, shape and users of its output."""
    ir.convenience.replace_nodes_and_values(graph, node, [node], body.tape.nodes, node.outputs, [result])


def _finish(model: ir.Model, prologue: Tape) -> None:
    """Insert what all layers share before everything else, and drop the dialect's import."""
    if prologue.nodes:
        model.graph.insert_before(model.graph[0], prologue.nodes)
    model.opset_imports.pop(DOMAIN, None)
