"""Operators on weights, before any activation meets them: nothing is computed, only remembered.

Letters: C input features, N output features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from optimc_passes.emit.cpu.constants import Constant
from optimc_passes.emit.cpu.no_kernel import NoKernelError
from optimc_passes.emit.cpu.stored import read_codes, table_bits
from optimc_passes.emit.cpu.values import QuantizedMatrix, Rows, TableRows, Value

Given = Sequence[Value | None]


def dequantize(node: ir.Node, given: Given) -> QuantizedMatrix:
    """DequantizeLinear of constants [C, N], blocked along C."""
    codes, scales, zeros = [*given, None][:3]
    group = node.attributes.get_int("block_size", 0)
    if not (isinstance(codes, Constant) and isinstance(scales, Constant) and isinstance(zeros, Constant | None)):
        raise NoKernelError("codes, scales and zero points must be constants")
    if len(codes.shape) != 2 or node.attributes.get_int("axis", 1) != 0 or group < 1:
        raise NoKernelError("a weight has two axes and is blocked along the first")
    tensor = _initializer(node.inputs[0])
    bits = tensor.dtype.bitwidth
    if bits not in (4, 8):
        raise NoKernelError(f"codes have {bits} bits")
    return QuantizedMatrix(
        name=codes.name.removesuffix(".codes"),
        codes=_unsigned(codes, tensor, bits),
        scales=scales,
        zeros=None if zeros is None else _unsigned(zeros, _initializer(node.inputs[2]), bits),
        bits=bits,
        group=min(group, codes.shape[0]),
    )


def table_rows(node: ir.Node, table: Constant) -> TableRows:
    """Gather of rows of codes, scales or zero points, which a DequantizeLinear reads."""
    tensor = _initializer(node.inputs[0])
    if not tensor.dtype.is_integer():
        return TableRows(table)
    bits = table_bits(tensor)
    return TableRows(_unsigned(table, tensor, bits), bits)


def dequantized_table(node: ir.Node, given: Given) -> QuantizedMatrix:
    """DequantizeLinear of rows of codes, scales and zero points, blocked along the rows: the table they come from."""
    codes, scales, zeros = [*given, None][:3]
    group = node.attributes.get_int("block_size", 0)
    if node.attributes.get_int("axis", 1) != -1 or group < 1:
        raise NoKernelError("rows are blocked along their last axis")
    looked_up = _table(codes)
    return QuantizedMatrix(
        name=looked_up.table.name.removesuffix(".codes"),
        codes=looked_up.table.transposed(),
        scales=_table(scales).table.transposed(),
        zeros=None if zeros is None else _table(zeros).table.transposed(),
        bits=looked_up.bits,
        group=min(group, looked_up.table.shape[1]),
        swapped=True,
    )


def transpose(node: ir.Node, matrix: QuantizedMatrix | Constant) -> QuantizedMatrix | Constant:
    """Transpose of a matrix."""
    if tuple(node.attributes.get_ints("perm", (1, 0))) != (1, 0):
        return matrix
    return matrix.transposed() if isinstance(matrix, Constant) else replace(matrix, swapped=not matrix.swapped)


def reorder(node: ir.Node, matrix: QuantizedMatrix, order: Value | None) -> QuantizedMatrix:
    """Gather of all rows of a matrix [C, N] in another order."""
    if matrix.swapped or matrix.order is not None or node.attributes.get_int("axis", 0) != 0:
        raise NoKernelError("a quantized weight is reordered along its input features, once")
    if not isinstance(order, Constant) or not is_permutation(order, matrix.codes.shape[0]):
        raise NoKernelError("the order is no constant permutation")
    return replace(matrix, order=order)


def is_permutation(order: Constant, count: int) -> bool:
    """Whether the constant holds each of 0 .. count - 1 once."""
    return order.shape == (count,) and np.array_equal(np.sort(order.values()), np.arange(count))


def _table(value: Value | None) -> TableRows:
    match value:
        case Rows(TableRows() as rows):
            return rows
    raise NoKernelError("codes, scales and zero points are rows of tables, all of them")


def _unsigned(constant: Constant, tensor: ir.TensorProtocol, bits: int) -> Constant:
    return Constant(constant.name, constant.shape, np.dtype(np.uint8), lambda: read_codes(tensor, bits))


def _initializer(value: ir.Value | None) -> ir.TensorProtocol:
    if value is None or value.const_value is None:
        raise NoKernelError("codes and zero points are computed")
    return value.const_value
