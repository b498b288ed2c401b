"""PagedAttention in gathered form: the pool goes in, each layer's context is gathered from it, the call's rows go out.

Letters: T tokens in a call, B sequences, Q longest query, C longest context, H query heads, Hkv key/value heads,
D head dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import onnx_ir as ir

from optimc.errors import LoweringError
from optimc.plan import KvDtype, KvLayout
from optimc.plan.tensorrt_program import TensorRtAttention, TensorRtCache, TensorRtLayer, TensorRtWindow
from optimc_passes.dialect.decompose import QUERY_INDEX, UNPAD_INDEX
from optimc_passes.dialect.paged_attention import PagedAttention, is_paged_attention
from optimc_passes.dialect.replacement import Prologue, Replacement, operand
from optimc_passes.emit.tensorrt.attention_form import attend
from optimc_passes.emit.tensorrt.cached_rows import RowFormat, Rows

POOL_TYPES: Mapping[KvDtype, ir.DataType] = {
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
    "int8": ir.DataType.INT8,
}
"""What a layer's pool may hold, by its name in the KV layout."""


def gather_attention(model: ir.Model, kv: KvLayout, half: ir.DataType) -> TensorRtAttention:
    """Replace each PagedAttention, in place; return the ports that were added.

    Raises LoweringError naming the node whose cache has no such form.
    """
    return _Gathered(model, kv, half).ports()


@dataclass(frozen=True)
class _Seen:
    """What layers of one window share: context_slots [B, C] and mask [B, Q, C + Q]."""

    names: TensorRtWindow
    context: ir.Value
    mask: ir.Value


class _Gathered:
    def __init__(self, model: ir.Model, kv: KvLayout, half: ir.DataType) -> None:
        self._graph, self._kv, self._half = model.graph, kv, half
        self._prologue = Prologue()
        nodes = [node for node in model.graph if is_paged_attention(node)]
        specs = [PagedAttention.from_node(node) for node in nodes]
        self._query_index = self._input(QUERY_INDEX, ir.DataType.INT64, "B", "Q")
        self._unpad_index = self._input(UNPAD_INDEX, ir.DataType.INT64, "T")
        self._seen = {window: self._window(window) for window in sorted({spec.window for spec in specs})}
        layers = {spec.layer: self._layer(node, spec) for node, spec in zip(nodes, specs, strict=True)}
        self._layers = tuple(layers[index] for index in sorted(layers))
        self._prologue.insert(model)

    def ports(self) -> TensorRtAttention:
        windows = tuple(seen.names for seen in self._seen.values())
        return TensorRtAttention(query_index=QUERY_INDEX, unpad_index=UNPAD_INDEX, windows=windows, layers=self._layers)

    def _window(self, window: int) -> _Seen:
        suffix = f"_window_{window}" if window else ""
        names = TensorRtWindow(window=window, context_slots=f"context_slots{suffix}", mask=f"mask{suffix}")
        context = self._input(names.context_slots, ir.DataType.INT64, "B", f"C{suffix}")
        return _Seen(names, context, self._input(names.mask, ir.DataType.BOOL, "B", "Q", f"K{suffix}"))

    def _layer(self, node: ir.Node, spec: PagedAttention) -> TensorRtLayer:
        rows = RowFormat(_pool_type(node, self._kv, spec.layer), spec.num_kv_heads, spec.head_dim)
        body = Replacement(self._prologue)
        seen = self._seen[spec.window]
        keys_port, keys = self._cached(body, f"key{{}}_{spec.layer}", operand(node, 1), rows, seen)
        values_port, values = self._cached(body, f"value{{}}_{spec.layer}", operand(node, 2), rows, seen)
        q = body.op("Gather", operand(node, 0), self._query_index, axis=0)
        padded = body.op("Reshape", attend(body, spec, q, keys, values, seen.mask), body.ints(-1, spec.q_width))
        result = body.op("Gather", padded, self._unpad_index, axis=0)
        body.name_after(node)
        body.put(self._graph, node, result)
        return TensorRtLayer(window=spec.window, keys=keys_port, values=values_port)

    def _cached(
        self, body: Replacement, name: str, written: ir.Value, rows: RowFormat, seen: _Seen
    ) -> tuple[TensorRtCache, ir.Value]:
        """Return the ports of a layer's keys or values, and all that are in sight, [B, C + Q, Hkv * D].

        `name` has a place for what a port is.
        """
        width = rows.heads * rows.dim
        step = rows.round(body, written)
        stored, step_stored = name.format("_pool"), f"step_{name.format('s')}"
        context = Rows(self._input(stored, rows.pool, "rows", width))
        self._output(step.stored, step_stored, rows.pool, width)
        port = TensorRtCache(pool=stored, step=step_stored)
        if step.scales is not None:
            scales, step_scales = name.format("_pool_scales"), f"step_{name.format('_scales')}"
            context = replace(context, scales=self._input(scales, ir.DataType.FLOAT16, "rows", rows.heads))
            self._output(step.scales, step_scales, ir.DataType.FLOAT16, rows.heads)
            port = TensorRtCache(pool=stored, step=step_stored, pool_scales=scales, step_scales=step_scales)
        in_sight = context.gathered(body, seen.context).followed_by(body, step.gathered(body, self._query_index))
        return port, rows.read(body, in_sight, self._half)

    def _input(self, name: str, dtype: ir.DataType, *shape: str | int) -> ir.Value:
        value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
        self._graph.inputs.append(value)
        return value

    def _output(self, value: ir.Value, name: str, dtype: ir.DataType, width: int) -> None:
        value.name, value.type, value.shape = name, ir.TensorType(dtype), ir.Shape(["T", width])
        self._graph.outputs.append(value)


def _pool_type(node: ir.Node, kv: KvLayout, layer: int) -> ir.DataType:
    dtype, keys = kv.dtype_of(layer), kv.layers[layer].keys
    if dtype not in POOL_TYPES:
        known = ", ".join(POOL_TYPES)
        raise LoweringError(f"node '{node.name}': the tensorrt target has no pool of {dtype}; use one of {known}")
    if keys != "token":
        raise LoweringError(
            f"node '{node.name}': the tensorrt target has no scales of keys per {keys}; use kv_quant: {{keys: token}}"
        )
    return POOL_TYPES[dtype]
