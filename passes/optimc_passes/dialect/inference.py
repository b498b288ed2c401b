"""The shape of every value, computed from the graph's inputs and parameters; what nodes declare is not looked at.

Node by node: ONNX's own inference for standard operators, the rules' results for the dialect's. Symbols are kept: T
tokens are not R rows. A dimension nobody can tell is None.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import onnx
import onnx_ir as ir

from optimc.wording import one_line
from optimc_passes.dialect.letters import bind, dims_of, resolve, show
from optimc_passes.dialect.op_rule import Facts
from optimc_passes.dialect.op_rules import rule_of
from optimc_passes.dialect.paged_attention import DOMAIN
from optimc_passes.dialect.weightless import is_weight

_BROADCAST = frozenset({"Add", "Sub", "Mul", "Div", "Pow", "Min", "Max", "Sum", "Mean", "Where", "PRelu"})
"""Operators whose operands meet element by element."""


class Known(NamedTuple):
    """The type of a value."""

    dtype: ir.DataType
    dims: tuple[int | str | None, ...] | None
    """None if not even the rank is known."""

    def __str__(self) -> str:
        return f"{self.dtype} {'of unknown rank' if self.dims is None else show(self.dims)}"


@dataclass(frozen=True)
class Inference:
    """Types by value, and where operands contradict each other."""

    types: dict[ir.Value, Known] = field(default_factory=dict)
    faults: list[tuple[ir.Node, str]] = field(default_factory=list)

    def shapes(self) -> dict[str, ir.Shape]:
        """Return what was computed, by the names of values."""
        found = {value.name: known.dims for value, known in self.types.items()}
        return {name: ir.Shape(dims) for name, dims in found.items() if name and dims is not None}


def infer(model: ir.Model) -> Inference:
    """Infer the types of all values of a graph whose nodes have what they need. No weight is loaded."""
    inference = Inference()
    graph = model.graph
    for value in (*graph.inputs, *graph.initializers.values()):
        if value.dtype is not None:
            dims = None if value.shape is None else tuple(dims_of(value.shape))
            inference.types[value] = Known(value.dtype, dims)
    by_onnx = _OnnxInference(model.opset_imports.get("", 0))
    for node in graph:
        given = tuple(None if value is None else inference.types.get(value) for value in node.inputs)
        results: Results = (None,) * len(node.outputs)
        if node.domain == DOMAIN:
            results = _by_rule(node, given)
        elif all(value is None or known is not None for value, known in zip(node.inputs, given, strict=True)):
            found = by_onnx.results(node, given)
            if isinstance(found, str):
                inference.faults.append((node, found))
            else:
                results = found
        for value, result in zip(node.outputs, results, strict=True):
            if result is not None:
                inference.types[value] = result
            elif value.dtype is not None:
                inference.types[value] = Known(value.dtype, None)
    return inference


Given = tuple[Known | None, ...]
Results = tuple[Known | None, ...]


def _by_rule(node: ir.Node, given: Given) -> Results:
    rule = rule_of(node)
    if rule is None or rule.outputs is None:
        return (None,) * len(node.outputs)
    facts: Facts = {name: attribute.value for name, attribute in node.attributes.items()}
    for operand, known in zip(rule.operands, [*given, *[None] * len(rule.operands)], strict=False):
        facts[f"has_{operand.name}"] = known is not None
        if known is not None and known.dims is not None:
            bind(operand.shape, known.dims, facts)
    shapes = (resolve(output.shape, facts) for output in rule.outputs)
    return tuple(
        Known(next(iter(output.dtypes)), None if dims is None else tuple(dims))
        for output, dims in zip(rule.outputs, shapes, strict=True)
    )


class _OnnxInference:
    """ONNX's inference of single nodes. Layers repeat: what was asked before is not asked again."""

    def __init__(self, opset: int) -> None:
        self._opset = opset
        self._known: dict[Hashable, Results | str] = {}

    def results(self, node: ir.Node, given: Given) -> Results | str:
        """Return the types of the node's outputs, or what is wrong with its operands."""
        data = tuple(None if value is None else _small_integers(value) for value in node.inputs)
        attributes = tuple((name, attribute.value) for name, attribute in node.attributes.items())
        constants = tuple(None if tensor is None else tensor.tobytes() for tensor in data)
        what = node.op_type, attributes, given, constants, len(node.outputs)
        if what not in self._known:
            self._known[what] = self._ask(node, given, data)
        return self._known[what]

    def _ask(self, node: ir.Node, given: Given, data: tuple[ir.TensorProtocol | None, ...]) -> Results | str:
        proto = onnx.NodeProto(op_type=node.op_type)
        proto.input.extend("" if known is None else f"i{index}" for index, known in enumerate(given))
        proto.output.extend(f"o{index}" for index in range(len(node.outputs)))
        proto.attribute.extend(ir.to_proto(attribute) for attribute in node.attributes.values())
        try:
            found = onnx.shape_inference.infer_node_outputs(
                onnx.defs.get_schema(node.op_type, self._opset),
                proto,
                {f"i{index}": _to_proto(known) for index, known in enumerate(given) if known is not None},
                {f"i{index}": ir.to_proto(tensor) for index, tensor in enumerate(data) if tensor is not None},
                opset_imports=[onnx.helper.make_opsetid("", self._opset)],
            )
        except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError) as error:
            return f"{one_line(error)}: {_show(given)}"
        if node.op_type in _BROADCAST and _symbols_clash(given):
            return f"different symbols meet: {_show(given)}"
        results = [_from_proto(found[name]) if name in found else None for name in proto.output]
        if node.op_type == "Reshape" and given[0] is not None and results[0] is not None:
            results[0] = _keep_symbol(given[0], results[0])
        return tuple(results)


def _keep_symbol(before: Known, after: Known) -> Known:
    """Name the one size a Reshape computes, if it can only be the one symbol there was: ONNX leaves it open."""
    old, new = before.dims, after.dims
    if old is None or new is None or new.count(None) != 1 or any(isinstance(dim, str) for dim in new):
        return after
    symbols = [dim for dim in old if not isinstance(dim, int)]
    sizes = [prod(dim for dim in dims if isinstance(dim, int)) for dims in (old, new)]
    if len(symbols) != 1 or sizes[0] != sizes[1]:
        return after
    return Known(after.dtype, tuple(symbols[0] if dim is None else dim for dim in new))


def _symbols_clash(given: Given) -> bool:
    """Whether two symbols meet on one axis, counted from the last."""
    shapes = [known.dims for known in given if known is not None and known.dims is not None]
    return any(
        len({dims[-axis] for dims in shapes if len(dims) >= axis and isinstance(dims[-axis], str)}) > 1
        for axis in range(1, max(map(len, shapes), default=0) + 1)
    )


def _small_integers(value: ir.Value) -> ir.TensorProtocol | None:
    """Return the constant a value is, if it says something about shapes."""
    tensor = ir.convenience.get_const_tensor(value)
    return None if tensor is None or not tensor.dtype.is_integer() or is_weight(tensor) else tensor


def _to_proto(known: Known) -> onnx.TypeProto:
    return onnx.helper.make_tensor_type_proto(known.dtype.value, known.dims)


def _from_proto(proto: onnx.TypeProto) -> Known:
    tensor = proto.tensor_type
    if not tensor.HasField("shape"):
        return Known(ir.DataType(tensor.elem_type), None)
    dims = (dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None for dim in tensor.shape.dim)
    return Known(ir.DataType(tensor.elem_type), tuple(dims))


def _show(given: Given) -> str:
    return ", ".join("absent" if known is None else str(known) for known in given)
