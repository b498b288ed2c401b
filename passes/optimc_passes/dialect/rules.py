"""The check that a graph obeys the dialect's rules.

Three layers: what one node must look like (`op_rules`, and ONNX's schemas), what the graph must look like (`INPUTS`,
`OUTPUTS`, opsets, names, order), and shape inference over the whole. No weight is ever loaded.

Letters: T tokens, R rows that need logits, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import onnx_ir as ir

from optimc_passes.dialect.inference import infer
from optimc_passes.dialect.node_faults import node_faults, show_shape
from optimc_passes.dialect.op_rule import Dim
from optimc_passes.dialect.paged_attention import DOMAIN, DOMAIN_VERSION, OP_TYPE, is_paged_attention

OPSET = 23
"""The oldest ONNX opset of the dialect: the first with RMSNormalization and RotaryEmbedding."""

INPUTS: tuple[tuple[str, ir.DataType, tuple[Dim, ...]], ...] = (
    ("input_ids", ir.DataType.INT64, ("T",)),
    ("position_ids", ir.DataType.INT64, ("T",)),
    ("logits_rows", ir.DataType.INT64, ("R",)),
)
"""The graph's first inputs. Those after them are parameters."""

OUTPUTS: tuple[tuple[str, ir.DataType, tuple[Dim, ...]], ...] = (("logits", ir.DataType.FLOAT, ("R", "V")),)
"""The graph's outputs."""


def verify_graph(model: ir.Model) -> list[str]:
    """Return every violation of the dialect's rules, one sentence each; an empty list means the graph is sound.

    Parameters may be graph inputs (an export without weights) or initializers (weights attached).
    """
    return verify_and_infer(model)[0]


def verify_and_infer(model: ir.Model) -> tuple[list[str], dict[str, ir.Shape]]:
    """Return every violation, and the shapes inferred for a graph that has none, by the names of values."""
    violations = [*_opsets(model), *_ports(model.graph), *_names_and_order(model.graph), *_layers(model.graph)]
    opset = model.opset_imports.get("", OPSET)
    where = {
        node: f"node {index} {node.op_type}" + (f" '{node.name}'" if node.name else "")
        for index, node in enumerate(model.graph)
    }
    for node, place in where.items():
        violations += [f"{place}: {fault}" for fault in node_faults(node, opset)]
    if violations:
        return violations, {}
    # Inference words it less well than a rule: it only speaks when all else is in order.
    inference = infer(model)
    violations = [f"{where[node]}: shape inference: {fault}" for node, fault in inference.faults]
    return violations, {} if violations else inference.shapes()


def _opsets(model: ir.Model) -> Iterator[str]:
    version = model.opset_imports.get("")
    if version is None or version < OPSET:
        yield f"opset: ONNX {version}, want at least {OPSET}"
    if model.functions:
        yield f"functions: {len(model.functions)} are not inlined, e.g. {next(iter(model.functions))[1]}"
    used = {node.domain for node in model.graph}
    for domain in sorted(used - set(model.opset_imports)):
        yield f"opset: domain '{domain}' is used but not imported"
    for domain in sorted(used - {"", DOMAIN}):
        yield f"opset: domain '{domain}' is no part of the dialect"
    if DOMAIN in used and model.opset_imports.get(DOMAIN, DOMAIN_VERSION) != DOMAIN_VERSION:
        yield f"opset: {DOMAIN} {model.opset_imports[DOMAIN]}, want {DOMAIN_VERSION}"


def _ports(graph: ir.Graph) -> Iterator[str]:
    for kind, found, wanted, required in (
        ("input", graph.inputs, INPUTS, len(INPUTS)),
        ("output", graph.outputs, OUTPUTS, 1),
    ):
        for index, (name, dtype, dims) in enumerate(wanted):
            if index >= len(found):
                if index < required:
                    yield f"{kind} {index}: absent, want {name}"
                continue
            value = found[index]
            if value.name != name:
                yield f"{kind} {index}: '{value.name}', want {name}"
            elif value.dtype != dtype:
                yield f"{kind} {name}: {value.dtype}, want {dtype}"
            elif value.shape is not None and len(value.shape) != len(dims):
                yield f"{kind} {name}: shape {show_shape(value.shape)}, want ({', '.join(map(str, dims))})"
    for value in graph.outputs[len(OUTPUTS) :]:
        yield f"output '{value.name}': no part of the dialect"
    for value in graph.inputs[len(INPUTS) :]:
        if value.dtype is None or value.shape is None or not all(isinstance(dim, int) for dim in value.shape):
            declared = f"{value.dtype} {show_shape(value.shape)}"
            yield f"parameter '{value.name}': dtype and shape must be known, got {declared}"


def _names_and_order(graph: ir.Graph) -> Iterator[str]:
    defined: set[ir.Value] = {*graph.inputs, *graph.initializers.values()}
    names = Counter(value.name for value in defined)
    for index, node in enumerate(graph):
        for position, value in enumerate(node.inputs):
            if value is not None and value not in defined:
                yield f"node {index} {node.op_type}: input {position} '{value.name}' is not defined before it"
        for value in node.outputs:
            names[value.name] += bool(value.name)
        defined.update(node.outputs)
    for name, count in names.items():
        if count > 1:
            yield f"value '{name}': {count} values have this name"
    for value in graph.outputs:
        if value not in defined:
            yield f"output '{value.name}': nothing computes it"


def _layers(graph: ir.Graph) -> Iterator[str]:
    nodes = [node for node in graph if is_paged_attention(node)]
    found = (node.attributes.get("layer") for node in nodes)
    # One of another kind is a fault of its node.
    layers = sorted(-1 if layer is None or layer.type != ir.AttributeType.INT else layer.as_int() for layer in found)
    if layers != list(range(len(layers))):
        yield f"{OP_TYPE}: layers {layers}, want each of 0..{len(layers) - 1} once"
