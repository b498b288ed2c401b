"""What depends on constants alone is computed now; a number added to a weight becomes part of how it is read."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator
from onnxscript.rewriter.pattern import MatchResult

from optimc_passes.fuse.constants import constant_array, constant_scalar
from optimc_passes.fuse.rule import ACCEPTED, FusionPass, NoOptions, Rule, declined
from optimc_passes.graph.weight_expression import Expression, Scaled, Shifted
from optimc_passes.graph.weight_tensor import WeightTensor

NO_WEIGHT = "it is no weight with a number"
NOT_CONSTANT = "its operands are not all small constants"
MAX_BYTES = 4096
"""Larger results are data, and a plan would hold them beside the weights they come from."""


class WeightWithNumber(Rule):
    """Base of rules for arithmetic on a weight and a number: the weight is bound with the number in its expression.

    Gemma's norms multiply by 1 + weight. The weight itself stays in the store as the checkpoint has it.
    """

    commute = True
    unrelated = frozenset({NO_WEIGHT})

    def bound(self, weight: Expression, number: float) -> Expression:
        """Return the weight with the number in its expression."""
        raise NotImplementedError

    def check(self, _context: Any, weight: ir.Value, number: ir.Value, result: ir.Value) -> MatchResult:
        """Decline anything but a float32 weight and a float32 number."""
        if not isinstance(weight.const_value, WeightTensor) or constant_scalar(number) is None:
            return declined(NO_WEIGHT, result)
        if number.shape is None or len(number.shape) > len(weight.const_value.shape):
            return declined("the number has more axes than the weight", result)
        if weight.dtype != ir.DataType.FLOAT or number.dtype != ir.DataType.FLOAT:
            return declined(f"weight and number are {weight.dtype} and {number.dtype}, not float32", result)
        if constant_scalar(number) == 0:
            return declined("the number is 0", result)
        return ACCEPTED

    def rewrite(self, op: Any, weight: ir.Value, number: ir.Value, result: ir.Value) -> Any:
        """Emit an initializer, which keeps the result's name."""
        tensor, scalar = weight.const_value, constant_scalar(number)
        assert isinstance(tensor, WeightTensor)
        assert scalar is not None
        return op.initializer(WeightTensor(self.bound(tensor.expression, scalar), tensor.store, name=result.name))


class WeightPlusNumber(WeightWithNumber):
    """weight + number."""

    def pattern(self, op: Any, weight: Any, number: Any) -> Any:
        """Match a sum."""
        return op.Add(weight, number, _outputs=["result"])

    def bound(self, weight: Expression, number: float) -> Expression:
        """Return the shifted weight."""
        return Shifted(weight, number)


class WeightMinusNumber(WeightWithNumber):
    """weight - number."""

    def pattern(self, op: Any, weight: Any, number: Any) -> Any:
        """Match a difference."""
        return op.Sub(weight, number, _outputs=["result"])

    def bound(self, weight: Expression, number: float) -> Expression:
        """Return the shifted weight."""
        return Shifted(weight, -number)


class WeightTimesNumber(WeightWithNumber):
    """weight * number."""

    def pattern(self, op: Any, weight: Any, number: Any) -> Any:
        """Match a product."""
        return op.Mul(weight, number, _outputs=["result"])

    def bound(self, weight: Expression, number: float) -> Expression:
        """Return the scaled weight."""
        return Scaled(weight, number)


class WeightOverNumber(WeightWithNumber):
    """weight / number."""

    def pattern(self, op: Any, weight: Any, number: Any) -> Any:
        """Match a quotient."""
        return op.Div(weight, number, _outputs=["result"])

    def bound(self, weight: Expression, number: float) -> Expression:
        """Return the scaled weight."""
        return Scaled(weight, 1 / number)


class ConstantOperands(Rule):
    """Any standard operator of one output over small constants."""

    keeps_inner = True  # of a node with several outputs too: `check` says what it is
    unrelated = frozenset({NOT_CONSTANT})

    def pattern(self, op: Any) -> Any:
        """Match every node of the standard domain."""
        return op.submodule("")(_allow_other_inputs=True, _outputs=["result"])

    def check(self, _context: Any, result: ir.Value) -> MatchResult:
        """Decline what is not constant, draws at random, holds a subgraph, or gives much data."""
        node = result.producer()
        assert node is not None
        if not node.inputs or any(value is not None and constant_array(value) is None for value in node.inputs):
            return declined(NOT_CONSTANT, node)
        if len(node.outputs) != 1 or result.is_graph_output():
            return declined("it has several outputs or gives one of the graph's", node)
        if node.op_type.startswith("Random") or any(
            attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
            for attribute in node.attributes.values()
        ):
            return declined(f"{node.op_type} may give something else each time", node)
        try:
            size = _computed(node).nbytes
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            return declined(f"onnx's reference does not compute it: {error}", node)
        if size > MAX_BYTES:
            return declined(f"the result has {size} bytes, over {MAX_BYTES}", node)
        return ACCEPTED

    def rewrite(self, op: Any, result: ir.Value) -> Any:
        """Emit an initializer, which keeps the result's name."""
        node = result.producer()
        assert node is not None
        return op.initializer(ir.tensor(_computed(node), name=result.name))


class FoldConstants(FusionPass[NoOptions]):
    """Nodes over constants become constants, sums and products of a weight and a number become weights."""

    name = "fold_constants"
    version = 1
    config_type = NoOptions
    rules = (ConstantOperands, WeightPlusNumber, WeightMinusNumber, WeightTimesNumber, WeightOverNumber)


def _computed(node: ir.Node) -> np.ndarray:
    """Run one node on its constants."""
    names = ["" if value is None else f"x{index}" for index, value in enumerate(node.inputs)]
    arrays = {name: constant_array(value) for name, value in zip(names, node.inputs, strict=True) if name}
    proto = onnx.helper.make_node(node.op_type, names, ["y"])
    proto.attribute.extend(ir.to_proto(attribute) for attribute in node.attributes.values())
    graph = onnx.helper.make_graph(
        [proto],
        "constant",
        [onnx.helper.make_value_info(name, onnx.TypeProto()) for name in arrays],
        [onnx.helper.make_value_info("y", onnx.TypeProto())],
    )
    owner = node.graph
    version = owner.opset_imports.get("", 23) if isinstance(owner, ir.Graph) else 23
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", version)])
    (array,) = ReferenceEvaluator(model).run(None, arrays)
    return np.asarray(array)
