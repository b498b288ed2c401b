"""Products with quantized weights in the form TensorRT keeps packed: codes -> DequantizeLinear -> MatMul.

A dialect graph says DequantizeLinear(codes [C, N], scales [g, N], zeros [g, N]) with any group and any zero points;
`block_codes.py` says what becomes of them. What reads a dequantized weight otherwise than as the right operand of a
product (a lookup in a table that is also the head's) reads a half copy of its own.

Letters: C input features, N output features, G group, g = ceil(C / G), b block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from optimc.errors import LoweringError
from optimc_passes.dialect.replacement import Prologue, Replacement, operand
from optimc_passes.emit.tensorrt.block_codes import (
    SMALLEST_BLOCK,
    block_of,
    dequantized,
    mean_weights,
    of_blocks,
    signed_codes,
)
from optimc_passes.emit.tensorrt.half_tensor import SCALE_TOLERANCE, HalfTensor
from optimc_passes.graph.weight_expression import Codes, Concat, Expression, Store
from optimc_passes.graph.weight_tensor import WeightTensor
from optimc_passes.weights import Quantized

_SIGNED = {ir.DataType.UINT4: ir.DataType.INT4, ir.DataType.UINT8: ir.DataType.INT8}


def pack_weights(model: ir.Model, half: ir.DataType) -> None:
    """Rewrite every dequantized weight, in place. No weight is read.

    Raises LoweringError naming the product whose groups fit no block.
    """
    prologue = Prologue()
    means: dict[tuple[ir.Value, int], ir.Value] = {}
    for node in tuple(model.graph):
        if node.op_type == "DequantizeLinear" and operand(node, 0).const_value is not None:
            _Weight(model.graph, node, half, prologue).pack(means)
    prologue.insert(model)


class _Weight:
    def __init__(self, graph: ir.Graph, node: ir.Node, half: ir.DataType, prologue: Prologue) -> None:
        self._graph, self._node, self._half, self._prologue = graph, node, half, prologue
        parts = [value.const_value for value in node.inputs if value is not None]
        codes, scales, zeros = [*parts, None][:3]
        assert codes is not None
        assert scales is not None
        self._codes, self._scales, self._zeros = codes, scales, zeros
        self._features, self._outputs = codes.shape.numpy()
        self._stored_bits, self._bits = codes.dtype.bitwidth, _bits(codes)
        self._group = node.attributes["block_size"].as_int()
        self._name = (operand(node, 0).name or "").removesuffix(".codes")

    def pack(self, means: dict[tuple[ir.Value, int], ir.Value]) -> None:
        """`means` holds the means of blocks of what products read, by value and block."""
        uses = tuple(self._node.outputs[0].uses())
        products = [node for node, index in uses if node.op_type == "MatMul" and index == 1]
        others = [(node, index) for node, index in uses if node not in products]
        if others:
            dense = self._half_constant("dense", self._dequantized, (self._features, self._outputs))
            for node, index in others:
                node.replace_input_with(index, dense)
        if not products:
            self._graph.remove(self._node, safe=True)
            return
        block = self._block(products[0])
        if self._zeros is not None:
            weights = self._half_constant(
                "mean_weights", lambda: self._mean_weights(block), (self._features // block, self._outputs)
            )
            for product in products:
                self._add_mean_product(product, block, weights, means)
        self._pack_codes(block)

    def _block(self, product: ir.Node) -> int:
        block = block_of(self._group, self._features, self._stored_bits)
        if block is None:
            raise LoweringError(
                f"node '{product.name}': groups of {self._group} over {self._features} features have no blocks of "
                f"{SMALLEST_BLOCK} or more features in common; use a group_size that has, or add it to ignore"
            )
        return block

    def _pack_codes(self, block: int) -> None:
        """Let the node dequantize signed codes in blocks, without zero points."""
        node, per_channel = self._node, block == self._features and self._stored_bits == 8
        shape = [self._outputs] if per_channel else [self._features // block, self._outputs]

        def scales() -> NDArray[Any]:
            return self._of_blocks(self._scales.numpy(), block).reshape(shape)

        node.replace_input_with(0, self._signed())
        node.replace_input_with(1, self._half_constant("scales", scales, shape, tolerance=SCALE_TOLERANCE))
        node.resize_inputs(2)
        node.attributes.clear()
        for name, number in ({"axis": 1} if per_channel else {"axis": 0, "block_size": block}).items():
            node.attributes[name] = ir.AttrInt64(name, number)
        node.name = node.name or f"{self._name}/DequantizeLinear"

    def _signed(self) -> ir.Value:
        codes, bits = self._codes, self._bits
        if codes.dtype not in _SIGNED:
            return operand(self._node, 0)
        signed = _SIGNED[codes.dtype]

        def shifted() -> ir.TensorProtocol:
            return ir.Tensor(signed_codes(codes.numpy(), bits).astype(signed.numpy()), dtype=signed)

        shape = ir.Shape(codes.shape.numpy())
        return self._constant(ir.LazyTensor(shifted, signed, shape, name=f"{self._name}.signed_codes"))

    def _add_mean_product(
        self, product: ir.Node, block: int, weights: ir.Value, means: dict[tuple[ir.Value, int], ir.Value]
    ) -> None:
        """Add to a product what the zero points bring: the means of blocks times b s (m - z)."""
        x = operand(product, 0)
        body = Replacement(self._prologue)
        if (x, block) not in means:
            assert x.shape is not None, "the dialect's products have shapes"
            split = body.op("Reshape", x, body.ints(*[0] * (len(x.shape) - 1), self._features // block, block))
            means[x, block] = body.op("ReduceMean", split, body.ints(-1), keepdims=0)
        plain = body.op("MatMul", x, self._node.outputs[0])
        result = body.op("Add", plain, body.op("MatMul", means[x, block], weights))
        body.name_after(product)
        body.put(self._graph, product, result)

    def _mean_weights(self, block: int) -> NDArray[np.float32]:
        assert self._zeros is not None
        # Of the scales that the first product multiplies by.
        scales = self._scales.numpy().astype(self._half.numpy()).astype(np.float32)
        zeros = self._of_blocks(self._zeros.numpy(), block)
        return mean_weights(self._of_blocks(scales, block), zeros, block, self._bits)

    def _dequantized(self) -> NDArray[np.float32]:
        zeros = None if self._zeros is None else self._zeros.numpy()
        return dequantized(self._codes.numpy(), self._scales.numpy(), zeros, self._group)

    def _of_blocks(self, per_group: NDArray[Any], block: int) -> NDArray[Any]:
        return of_blocks(per_group, self._group, block, self._features)

    def _half_constant(
        self, part: str, read: Callable[[], NDArray[Any]], shape: Sequence[int], *, tolerance: float = np.inf
    ) -> ir.Value:
        name = f"{self._name}.{part}.{self._half.name.lower()}"
        return self._constant(HalfTensor(read, self._half, ir.Shape(shape), name=name, tolerance=tolerance))

    def _constant(self, tensor: ir.TensorProtocol) -> ir.Value:
        value = ir.Value(
            name=tensor.name,
            shape=ir.Shape(tensor.shape.numpy()),
            type=ir.TensorType(tensor.dtype),
            const_value=tensor,
        )
        self._graph.register_initializer(value)
        return value


def _bits(codes: ir.TensorProtocol) -> int:
    """Return how many bits codes have, which their type may exceed: of 3-bit codes 4 is the middle, not 8.

    Of joined weights it is the most bits that one of them has: in that range lie the codes of all.
    """
    if not isinstance(codes, WeightTensor):
        return codes.dtype.bitwidth
    return _most_bits(codes.expression, codes.store)


def _most_bits(expression: Expression, store: Store) -> int:
    if isinstance(expression, Concat):
        return max(_most_bits(part, store) for part in expression.parts)
    assert isinstance(expression, Codes), f"{expression} holds codes"
    weight = store[expression.name]
    assert isinstance(weight, Quantized), f"{expression.name} is quantized"
    return weight.bits
