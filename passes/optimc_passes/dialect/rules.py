"""The dialect's rules, as data, and the check that a graph obeys them.

Three layers: what one node must look like (`RULES` for the operators optimc gives a meaning of its own, ONNX's schemas
for the rest), what the graph must look like (`INPUTS`, `OUTPUTS`, opsets, names, order), and ONNX shape inference over
the whole. No weight is ever loaded.

Letters: T tokens, R rows that need logits, V vocabulary, C input features, N output features, G group along C.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import onnx
import onnx_ir as ir

from optimc.wording import one_line
from optimc_passes.dialect.decompose import decompose_causal
from optimc_passes.dialect.paged_attention import DOMAIN, DOMAIN_VERSION, OP_TYPE, is_paged_attention
from optimc_passes.dialect.weightless import without_weights

OPSET = 23
"""The oldest ONNX opset of the dialect: the first with RMSNormalization and RotaryEmbedding."""

FLOATS = frozenset({ir.DataType.FLOAT})
CODES = frozenset({ir.DataType.UINT4, ir.DataType.INT4, ir.DataType.UINT8, ir.DataType.INT8})

Facts = dict[str, int | float]
"""A node's attributes, and the sizes its operands have given to letters so far."""

Dim = int | str
"""A size, or a letter that must stand for the same size in all operands of the node."""


@dataclass(frozen=True, slots=True)
class Operand:
    """What one input must be. `shape` is computed from the attributes and letters bound by the operands before it."""

    name: str
    dtypes: frozenset[ir.DataType]
    shape: Callable[[Facts], tuple[Dim, ...]]
    optional: bool = False
    same_dtype_as: int | None = None
    """Index of an operand with which the dtype is shared."""


@dataclass(frozen=True, slots=True)
class Attribute:
    """An attribute that must be present, the type it has and the values it may take."""

    name: str
    type: ir.AttributeType
    allowed: Callable[[float], bool]
    wanted: str


@dataclass(frozen=True, slots=True)
class OpRule:
    """One operator."""

    operands: tuple[Operand, ...]
    attributes: tuple[Attribute, ...]
    relations: tuple[tuple[Callable[[Facts], bool], str], ...] = ()
    """Conditions on attributes and letters, each with the sentence that reports its failure."""
    applies: Callable[[ir.Node], bool] = lambda _node: True


def _int(name: str, allowed: Callable[[float], bool], wanted: str) -> Attribute:
    return Attribute(name, ir.AttributeType.INT, allowed, wanted)


def _float(name: str, allowed: Callable[[float], bool], wanted: str) -> Attribute:
    return Attribute(name, ir.AttributeType.FLOAT, allowed, wanted)


def _groups(facts: Facts) -> tuple[Dim, ...]:
    if "C" not in facts:
        return ("groups", "N")
    return (-int(-facts["C"] // facts["block_size"]), "N")


def _is_blocked(node: ir.Node) -> bool:
    return "block_size" in node.attributes and node.attributes["block_size"].value != 0


RULES: dict[tuple[str, str], OpRule] = {
    (DOMAIN, OP_TYPE): OpRule(
        operands=(
            Operand("q", FLOATS, lambda f: ("T", int(f["num_heads"] * f["head_dim"]))),
            Operand("k", FLOATS, lambda f: ("T", int(f["num_kv_heads"] * f["head_dim"]))),
            Operand("v", FLOATS, lambda f: ("T", int(f["num_kv_heads"] * f["head_dim"]))),
        ),
        attributes=(
            _int("layer", lambda v: v >= 0, "at least 0"),
            _int("num_heads", lambda v: v > 0, "positive"),
            _int("num_kv_heads", lambda v: v > 0, "positive"),
            _int("head_dim", lambda v: v > 0, "positive"),
            _float("scale", lambda v: 0 < v < float("inf"), "positive and finite"),
            _int("window", lambda v: v >= 0, "at least 0"),
            _float("softcap", lambda v: 0 <= v < float("inf"), "at least 0 and finite"),
        ),
        relations=(
            (
                lambda f: f["num_heads"] % f["num_kv_heads"] == 0,
                "num_heads {num_heads} is no multiple of num_kv_heads {num_kv_heads}",
            ),
        ),
    ),
    ("", "DequantizeLinear"): OpRule(
        operands=(
            Operand("codes", CODES, lambda _: ("C", "N")),
            Operand("scales", FLOATS, _groups),
            Operand("zeros", CODES, _groups, optional=True, same_dtype_as=0),
        ),
        attributes=(
            _int("axis", lambda v: v == 0, "0"),
            _int("block_size", lambda v: v > 0, "positive"),
        ),
        relations=((lambda f: f["block_size"] <= f.get("C", f["block_size"]), "block_size {block_size} above C {C}"),),
        applies=_is_blocked,
    ),
    ("", "MatMul"): OpRule(
        operands=(
            Operand("x", FLOATS, lambda _: ("...", "C")),
            Operand("w", FLOATS, lambda _: ("C", "N")),
        ),
        attributes=(),
        # A product of two activations follows ONNX's own broadcasting, which shape inference checks.
        applies=lambda node: _rank(node, 1) == 2,
    ),
}

INPUTS: tuple[tuple[str, ir.DataType, tuple[Dim, ...]], ...] = (
    ("input_ids", ir.DataType.INT64, ("T",)),
    ("position_ids", ir.DataType.INT64, ("T",)),
    ("logits_rows", ir.DataType.INT64, ("R",)),
)
"""The graph's first inputs. Those after them are parameters."""

OUTPUTS: tuple[tuple[str, ir.DataType, tuple[Dim, ...]], ...] = (
    ("logits", ir.DataType.FLOAT, ("R", "V")),
    ("medusa_logits", ir.DataType.FLOAT, ("K", "R", "V")),
)
"""The graph's outputs; the second only with Medusa heads."""


def verify_graph(model: ir.Model) -> list[str]:
    """Return every violation of the dialect's rules, one sentence each; an empty list means the graph is sound.

    Parameters may be graph inputs (an export without weights) or initializers (weights attached).
    """
    violations = [*_opsets(model), *_ports(model.graph), *_names_and_order(model.graph), *_layers(model.graph)]
    for index, node in enumerate(model.graph):
        where = f"node {index} {node.op_type}" + (f" '{node.name}'" if node.name else "")
        violations += [f"{where}: {fault}" for fault in _node_faults(model, node)]
    # Inference stops at the first contradiction and words it less well: it only speaks when all else is in order.
    return violations or list(_inference(model))


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
                yield f"{kind} {name}: shape {_show(value.shape)}, want ({', '.join(map(str, dims))})"
    for value in graph.outputs[len(OUTPUTS) :]:
        yield f"output '{value.name}': no part of the dialect"
    for value in graph.inputs[len(INPUTS) :]:
        if value.dtype is None or value.shape is None or not all(isinstance(dim, int) for dim in value.shape):
            yield f"parameter '{value.name}': dtype and shape must be known, got {value.dtype} {_show(value.shape)}"


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
    layers = sorted(node.attributes.get_int("layer", -1) for node in nodes)
    if layers != list(range(len(layers))):
        yield f"{OP_TYPE}: layers {layers}, want each of 0..{len(layers) - 1} once"


def _node_faults(model: ir.Model, node: ir.Node) -> Iterator[str]:
    if (node.domain, node.op_type) not in RULES:
        yield from _schema_faults(model, node)
        return
    rule = RULES[node.domain, node.op_type]
    if not rule.applies(node):
        yield from _schema_faults(model, node)
        return
    facts: Facts = {}
    faults = [*_arity_faults(rule, node), *_attribute_faults(rule, node, facts)]
    if faults:
        yield from faults
        return
    for index, operand in enumerate(rule.operands):
        value = node.inputs[index] if index < len(node.inputs) else None
        if value is not None:
            yield from _operand_faults(node, operand, value, facts)
    for holds, sentence in rule.relations:
        if not holds(facts):
            yield sentence.format(**facts)


def _arity_faults(rule: OpRule, node: ir.Node) -> Iterator[str]:
    names = [operand.name for operand in rule.operands]
    if len(node.inputs) > len(names):
        yield f"{len(node.inputs)} inputs, want {', '.join(names)}"
    for index, operand in enumerate(rule.operands):
        if not operand.optional and (index >= len(node.inputs) or node.inputs[index] is None):
            yield f"input {index} ({operand.name}) is absent"
    if len(node.outputs) != 1:
        yield f"{len(node.outputs)} outputs, want 1"


def _attribute_faults(rule: OpRule, node: ir.Node, facts: Facts) -> Iterator[str]:
    for attribute in rule.attributes:
        found = node.attributes.get(attribute.name)
        if found is None:
            yield f"attribute {attribute.name} is absent"
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
    if value.dtype is not None and value.dtype not in operand.dtypes:
        allowed = ", ".join(sorted(dtype.name for dtype in operand.dtypes))
        yield f"{operand.name}: {value.dtype.name}, want {allowed}"
    elif operand.same_dtype_as is not None:
        other = node.inputs[operand.same_dtype_as]
        if other is not None and None not in (value.dtype, other.dtype) and value.dtype != other.dtype:
            yield f"{operand.name}: {value.dtype}, want {other.dtype}"
    if value.shape is None:
        return
    wanted = operand.shape(facts)
    found = tuple(value.shape)
    if wanted[0] == "...":
        wanted, found = wanted[1:], found[-(len(wanted) - 1) :]
    resolved = tuple(facts.get(dim, dim) if isinstance(dim, str) else dim for dim in wanted)
    if len(found) != len(wanted) or any(
        isinstance(have, int) and isinstance(want, int) and have != want
        for have, want in zip(found, resolved, strict=True)
    ):
        yield f"{operand.name} {_show(value.shape)}, want ({', '.join(map(str, resolved))})"
        return
    for dim, have in zip(wanted, found, strict=True):
        if isinstance(dim, str) and isinstance(have, int):
            facts[dim] = have


def _schema_faults(model: ir.Model, node: ir.Node) -> Iterator[str]:
    if node.domain != "":
        if node.domain == DOMAIN:
            yield f"{DOMAIN} has no operator of this name"
        return
    version = model.opset_imports.get("", OPSET)
    try:
        schema = onnx.defs.get_schema(node.op_type, version)
    except onnx.defs.SchemaError:
        yield f"ONNX {version} has no operator of this name"
        return
    if not schema.min_input <= len(node.inputs) <= schema.max_input:
        yield f"{len(node.inputs)} inputs, want {schema.min_input} to {schema.max_input}"
    for name, attribute in schema.attributes.items():
        if attribute.required and name not in node.attributes:
            yield f"attribute {name} is absent"
    for name in node.attributes:
        if name not in schema.attributes:
            yield f"attribute {name} is unknown to ONNX {version}"


def _inference(model: ir.Model) -> Iterator[str]:
    # ONNX forgives every error in a graph with an operator it does not know, so attention is decomposed first.
    proto = ir.to_proto(without_weights(decompose_causal(model)))
    try:
        onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True, data_prop=True)
    except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError) as error:
        yield f"shape inference: {one_line(error)}"


def _rank(node: ir.Node, index: int) -> int | None:
    value = node.inputs[index] if index < len(node.inputs) else None
    return None if value is None or value.shape is None else len(value.shape)


def _show(shape: ir.Shape | None) -> str:
    return "of unknown rank" if shape is None else f"({', '.join(str(dim) for dim in shape)})"
