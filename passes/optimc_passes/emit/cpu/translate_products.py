"""Linear layers, lookups in tables, and the gathers around them.

Letters: T tokens, R rows that need logits, C input features, N output features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from optimc.plan.cpu_program import Embed, GatherRows, Linear, View
from optimc_passes.emit.cpu.axes import Axes
from optimc_passes.emit.cpu.constants import Constant
from optimc_passes.emit.cpu.emitter import Emitter, label
from optimc_passes.emit.cpu.matrices import dequantized_table, is_permutation, reorder, table_rows
from optimc_passes.emit.cpu.no_kernel import NoKernelError
from optimc_passes.emit.cpu.values import LogitsRows, QuantizedMatrix, Rounded, Rows, TokenIds, Value, view_of
from optimc_passes.emit.cpu.weights import FloatSource, IntSource, TableSource

Given = Sequence[Value | None]


def matmul(e: Emitter, _node: ir.Node, given: Given) -> Rows:
    """x [..., C] times a weight [C, N]."""
    x, weight = given
    view, static_scale = _multiplied(x)
    assert isinstance(x, Rows)
    match weight:
        case Constant() if static_scale is not None:
            raise NoKernelError("its activations are rounded with a static scale, and its weight is no integers")
        case Constant(shape=(features, outputs)):
            key = e.weight((id(weight), "panels"), weight.name, lambda: FloatSource(weight))
        case QuantizedMatrix(shape=(features, outputs), order=None, swapped=False):
            key = _int_weight(e, weight)
        case QuantizedMatrix():
            raise NoKernelError("a quantized weight is read along its input features, in the order of its codes")
        case _:
            raise NoKernelError("two activations are multiplied")
    if x.axes.inner != (features,):
        raise NoKernelError(f"rows of {list(x.axes.inner)} meet {features} input features")
    name = weight.name.removesuffix(".weight")
    out = e.new(name, x.rows, outputs)
    e.emit(Linear(name=name, x=view, weight=key, static_scale=static_scale, out=out))
    return Rows(out, Axes(x.axes.lead, (outputs,)), x.rows)


def _multiplied(x: Value | None) -> tuple[View, float | None]:
    """Return the columns a linear layer multiplies, and the static scale they are rounded with, if there is one."""
    match x:
        case Rows(Rounded(view, scale, is_codes=False)):
            return view, scale
    return view_of(x), None


def gather(e: Emitter, node: ir.Node, given: Given) -> Value:
    """Lookup of tokens in a table, of rows that need logits, and reordering of features."""
    data, places = given
    match data, places:
        case Constant() | QuantizedMatrix(), Rows(TokenIds()):
            _check_lookup(node, data, places)
            if isinstance(data, Constant) and _is_dequantized(node):
                return Rows(table_rows(node, data), Axes(places.axes.lead, data.shape[1:]))
            return _embedding(e, data, places.axes.lead)
        case QuantizedMatrix(), _:
            return reorder(node, data, places)
        case Rows(), LogitsRows():
            return _logits_rows(e, node, data)
        case Rows(), Constant():
            return _reordered(e, node, data, places)
    raise NoKernelError("this kind of lookup is not known")


def dequantized_rows(e: Emitter, node: ir.Node, given: Given) -> Rows:
    """Rows of a table in codes, float32."""
    codes = given[0]
    assert isinstance(codes, Rows)
    return _embedding(e, dequantized_table(node, given), codes.axes.lead)


def _check_lookup(node: ir.Node, table: Constant | QuantizedMatrix, ids: Rows) -> None:
    if len(table.shape) != 2 or node.attributes.get_int("axis", 0) != 0 or ids.axes.inner:
        raise NoKernelError("tokens are rows of a matrix")


def _is_dequantized(node: ir.Node) -> bool:
    readers = [reader for reader, _ in node.outputs[0].uses()]
    return bool(readers) and all(reader.op_type == "DequantizeLinear" for reader in readers)


def _embedding(e: Emitter, table: Constant | QuantizedMatrix, lead: int) -> Rows:
    if isinstance(table, Constant):
        key = e.weight((id(table), "table"), table.name, lambda: TableSource(table))
    elif table.swapped:
        key = _int_weight(e, table)
    else:
        raise NoKernelError("a quantized table is read along its input features")
    name, width = table.name.removesuffix(".weight"), table.shape[1]
    out = e.new(name, "tokens", width)
    e.emit(Embed(name=name, table=key, scale=1.0, out=out))
    if isinstance(table, QuantizedMatrix) and table.order is not None:
        out = e.permuted(name, out, table.order)
    return Rows(out, Axes(lead, (width,)))


def _logits_rows(e: Emitter, node: ir.Node, x: Rows) -> Rows:
    view, scale = _multiplied(x)
    if x.axes.positive(node.attributes.get_int("axis", 0)) != x.axes.lead or x.rows != "tokens":
        raise NoKernelError("logits_rows picks tokens")
    name = label(node)
    out = e.new(name, "logits", view.width)
    e.emit(GatherRows(name=name, x=view, out=out))
    return Rows(out if scale is None else Rounded(out, scale), x.axes, "logits")


def _reordered(e: Emitter, node: ir.Node, x: Rows, order: Constant) -> Rows:
    view, scale = _multiplied(x)
    last = x.axes.positive(node.attributes.get_int("axis", 0)) == x.axes.rank - 1
    if not last or len(x.axes.inner) != 1 or not is_permutation(order, view.width):
        raise NoKernelError("features are only reordered, all of a row")
    ordered = e.permuted(label(node), view, order)
    return Rows(ordered if scale is None else Rounded(ordered, scale), x.axes, x.rows)


def _int_weight(e: Emitter, matrix: QuantizedMatrix) -> str:
    source = IntSource(matrix.codes, matrix.scales, matrix.zeros, matrix.bits, matrix.group, matrix.group)
    return e.weight((id(matrix.codes), "codes"), matrix.name, lambda: source)
