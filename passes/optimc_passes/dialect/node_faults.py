"""What is wrong with one node, by the rules of its operator and by ONNX's schema."""

from __future__ import annotations

from collections.abc import Iterator

import onnx
import onnx_ir as ir

from optimc_passes.dialect.letters import bind, dims_of, show, words
from optimc_passes.dialect.op_rule import Facts, Operand, OpRule, Output, Shape
from optimc_passes.dialect.op_rules import rule_of
from optimc_passes.dialect.paged_attention import DOMAIN


def node_faults(node: ir.Node, opset: int) -> Iterator[str]:
    """Yield each fault of a node in a graph of ONNX opset `opset`, without saying which node it is."""
    faults = list(_schema_faults(node, opset))
    if faults:
        yield from faults
        return
    rule = rule_of(node)
    if rule is None:
        return
    facts = rule.more_facts(node)
    faults = [*_arity_faults(rule, node), *_attribute_faults(rule, node, facts)]
    if faults:
        yield from faults
        return
    for index, operand in enumerate(rule.operands):
        value = node.inputs[index] if index < len(node.inputs) else None
        facts[f"has_{operand.name}"] = value is not None
        if value is not None:
            faults += _operand_faults(node, operand, value, facts)
    faults += [sentence.format(**facts) for holds, sentence in rule.relations if not holds(facts)]
    yield from faults
    # What a node gives is only judged by operands that are in order.
    for output, value in zip(rule.outputs or () if not faults else (), node.outputs, strict=False):
        yield from _dtype_faults(output, value)
        yield from _shape_faults(output.name, output.shape, value, facts)


def show_shape(shape: ir.Shape | None) -> str:
    """Return a shape for a message."""
    return "of unknown rank" if shape is None else show(dims_of(shape))


def _arity_faults(rule: OpRule, node: ir.Node) -> Iterator[str]:
    names = [operand.name for operand in rule.operands]
    if len(node.inputs) > len(names):
        yield f"{len(node.inputs)} inputs, want {', '.join(names)}"
    for index, operand in enumerate(rule.operands):
        if not operand.optional and (index >= len(node.inputs) or node.inputs[index] is None):
            yield f"input {index} ({operand.name}) is absent"
    if rule.outputs is not None and len(node.outputs) != len(rule.outputs):
        which = f": {', '.join(output.name for output in rule.outputs)}" if len(rule.outputs) > 1 else ""
        yield f"{len(node.outputs)} outputs, want {len(rule.outputs)}{which}"


def _attribute_faults(rule: OpRule, node: ir.Node, facts: Facts) -> Iterator[str]:
    for attribute in rule.attributes:
        found = node.attributes.get(attribute.name)
        if found is None:
            if attribute.default is None:
                yield f"attribute {attribute.name} is absent"
            facts[attribute.name] = attribute.default
        elif found.type != attribute.type:
            yield f"attribute {attribute.name}: {found.type.name}, want {attribute.type.name}"
        elif not attribute.allowed(found.value):
            yield f"attribute {attribute.name}: {found.value}, want {attribute.wanted}"
        else:
            facts[attribute.name] = found.value
    if node.domain == DOMAIN:
        for name in sorted(set(node.attributes) - {attribute.name for attribute in rule.attributes}):
            yield f"attribute {name} is unknown"


def _operand_faults(node: ir.Node, operand: Operand, value: ir.Value, facts: Facts) -> Iterator[str]:
    faults = list(_dtype_faults(operand, value))
    if not faults and operand.same_dtype_as is not None:
        other = node.inputs[operand.same_dtype_as]
        if other is not None and None not in (value.dtype, other.dtype) and value.dtype != other.dtype:
            faults.append(f"{operand.name}: {value.dtype}, want {other.dtype}")
    yield from faults
    yield from _shape_faults(operand.name, operand.shape, value, facts)


def _dtype_faults(wanted: Operand | Output, value: ir.Value) -> Iterator[str]:
    if value.dtype is not None and value.dtype not in wanted.dtypes:
        allowed = ", ".join(sorted(dtype.name for dtype in wanted.dtypes))
        yield f"{wanted.name}: {value.dtype.name}, want {allowed}"


def _shape_faults(name: str, shape: Shape, value: ir.Value, facts: Facts) -> Iterator[str]:
    """Yield why the value's shape is not the one wanted; if it is, let letters stand for the sizes it has."""
    if value.shape is not None and not bind(shape, dims_of(value.shape), facts):
        yield f"{name} {show_shape(value.shape)}, want {words(shape, facts)}"


def _schema_faults(node: ir.Node, opset: int) -> Iterator[str]:
    if node.domain != "":
        if node.domain == DOMAIN and rule_of(node) is None:
            yield f"{DOMAIN} has no operator of this name"
        return
    try:
        schema = onnx.defs.get_schema(node.op_type, opset)
    except onnx.defs.SchemaError:
        yield f"ONNX {opset} has no operator of this name"
        return
    if not schema.min_input <= len(node.inputs) <= schema.max_input:
        yield f"{len(node.inputs)} inputs, want {schema.min_input} to {schema.max_input}"
    for name, attribute in schema.attributes.items():
        if attribute.required and name not in node.attributes:
            yield f"attribute {name} is absent"
    for name, found in node.attributes.items():
        if name not in schema.attributes:
            yield f"attribute {name} is unknown to ONNX {opset}"
            continue
        wanted = str(schema.attributes[name].type).rpartition(".")[2]
        if found.type.name != wanted:
            yield f"attribute {name}: {found.type.name}, want {wanted}"
