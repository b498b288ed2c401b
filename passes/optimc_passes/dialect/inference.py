"""The shape of every value, computed from the graph's inputs and parameters; what nodes declare is not looked at.

Node by node: ONNX's own inference for standard operators, the rules' results for the dialect's. Symbols are kept: T
tokens are not R rows. A dimension nobody can tell is None.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

import onnx
import onnx_ir as ir

from optimc.wording import one_line
from optimc_passes.dialect.letters import Dims, bind, dims_of, resolve, show
from optimc_passes.dialect.op_rules import Facts, rule_of
from optimc_passes.dialect.paged_attention import DOMAIN
from optimc_passes.dialect.weightless import is_weight

_BROADCAST = frozenset({"Add", "Sub", "Mul", "Div", "Pow", "Min", "Max", "Sum", "Mean", "Where", "PRelu"})
"""Operators whose operands meet element by element."""


@dataclass(frozen=True)
class Inference:
    """Types by value, and where operands contradict each other."""

    types: dict[ir.Value, onnx.TypeProto] = field(default_factory=dict)
    """Without a shape where the rank is not known."""
    faults: list[tuple[ir.Node, str]] = field(default_factory=list)

    def shapes(self) -> dict[str, ir.Shape]:
        """Return what was computed, by the names of values."""
        found = {value: _dims(known) for value, known in self.types.items() if value.name}
        return {value.name or "": ir.Shape(dims) for value, dims in found.items() if dims is not None}


def infer(model: ir.Model) -> Inference:
    """Infer the types of all values of a graph whose nodes have what they need. No weight is loaded."""
    inference = Inference()
    graph = model.graph
    for value in (*graph.inputs, *graph.initializers.values()):
        if value.dtype is not None:
            inference.types[value] = _type(value.dtype, None if value.shape is None else dims_of(value.shape))
    opset = model.opset_imports.get("", 0)
    for node in graph:
        given = [None if value is None else inference.types.get(value) for value in node.inputs]
        missing = any(known is None for known, value in zip(given, node.inputs, strict=True) if value is not None)
        results: list[onnx.TypeProto | None] = [None] * len(node.outputs)
        if node.domain == DOMAIN:
            results = _by_rule(node, given)
        elif not missing:
            try:
                results = _by_onnx(node, given, opset)
            except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError) as error:
                inference.faults.append((node, f"{one_line(error)}: {_operands(given)}"))
            if node.op_type in _BROADCAST and _symbols_clash([_dims(known) for known in given if known is not None]):
                inference.faults.append((node, f"different symbols meet: {_operands(given)}"))
        for value, result in zip(node.outputs, results, strict=True):
            if result is not None:
                inference.types[value] = result
            elif value.dtype is not None:
                inference.types[value] = _type(value.dtype, None)
    return inference


def _by_rule(node: ir.Node, given: list[onnx.TypeProto | None]) -> list[onnx.TypeProto | None]:
    rule = rule_of(node)
    if rule is None or rule.outputs is None:
        return [None] * len(node.outputs)
    facts: Facts = {name: attribute.value for name, attribute in node.attributes.items()}
    for operand, known in zip(rule.operands, [*given, *[None] * len(rule.operands)], strict=False):
        facts[f"has_{operand.name}"] = known is not None
        dims = None if known is None else _dims(known)
        if dims is not None:
            bind(operand.shape, dims, facts)
    return [_type(next(iter(output.dtypes)), resolve(output.shape, facts)) for output in rule.outputs]


def _by_onnx(node: ir.Node, given: list[onnx.TypeProto | None], opset: int) -> list[onnx.TypeProto | None]:
    proto = onnx.NodeProto(op_type=node.op_type)
    proto.input.extend("" if known is None else f"i{index}" for index, known in enumerate(given))
    proto.output.extend(f"o{index}" for index in range(len(node.outputs)))
    proto.attribute.extend(ir.to_proto(attribute) for attribute in node.attributes.values())
    data = {
        f"i{index}": ir.to_proto(tensor)
        for index, value in enumerate(node.inputs)
        if (tensor := _small_integers(value)) is not None
    }
    found = onnx.shape_inference.infer_node_outputs(
        onnx.defs.get_schema(node.op_type, opset),
        proto,
        {f"i{index}": known for index, known in enumerate(given) if known is not None},
        data,
        opset_imports=[onnx.helper.make_opsetid("", opset)],
    )
    results = [found.get(name) for name in proto.output]
    if node.op_type == "Reshape" and results[0] is not None and given[0] is not None:
        _keep_symbol(given[0], results[0])
    return results


def _keep_symbol(before: onnx.TypeProto, after: onnx.TypeProto) -> None:
    """Name the one size a Reshape computes, if it can only be the one symbol there was: ONNX leaves it open."""
    old, new = _dims(before), _dims(after)
    if old is None or new is None or new.count(None) != 1:
        return
    symbols = [dim for dim in old if not isinstance(dim, int)]
    sizes = [prod(dim for dim in dims if isinstance(dim, int)) for dims in (old, new)]
    left = [dim for dim in new if isinstance(dim, str)]
    if len(symbols) == 1 and symbols[0] is not None and not left and sizes[0] == sizes[1]:
        after.tensor_type.shape.dim[new.index(None)].dim_param = symbols[0]


def _symbols_clash(operands: list[Dims | None]) -> bool:
    """Whether two symbols meet on one axis, counted from the last."""
    known = [dims for dims in operands if dims is not None]
    return any(
        len({dims[-axis] for dims in known if len(dims) >= axis and isinstance(dims[-axis], str)}) > 1
        for axis in range(1, max(map(len, known), default=0) + 1)
    )


def _small_integers(value: ir.Value | None) -> ir.TensorProtocol | None:
    """Return the constant a value is, if it says something about shapes."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return None if tensor is None or not tensor.dtype.is_integer() or is_weight(tensor) else tensor


def _type(dtype: ir.DataType, dims: Dims | None) -> onnx.TypeProto:
    return onnx.helper.make_tensor_type_proto(dtype.value, dims)


def _dims(known: onnx.TypeProto) -> Dims | None:
    if not known.tensor_type.HasField("shape"):
        return None
    return [_dim(dim) for dim in known.tensor_type.shape.dim]


def _dim(dim: onnx.TensorShapeProto.Dimension) -> int | str | None:
    return dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None


def _operands(given: list[onnx.TypeProto | None]) -> str:
    return ", ".join(_show(known) for known in given)


def _show(known: onnx.TypeProto | None) -> str:
    if known is None:
        return "absent"
    dims = _dims(known)
    return f"{ir.DataType(known.tensor_type.elem_type)} {'of unknown rank' if dims is None else show(dims)}"
