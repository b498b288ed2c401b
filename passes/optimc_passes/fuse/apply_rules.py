"""Apply rules to a model: onnxscript matches, checks and builds; here the result is put into the graph.

onnxscript's own loop applies nothing while it traces, tags nodes with the rule's name and calls values val_0, val_1. A
plan wants the counts and reasons of the very run that changed the graph, and names that mean something.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir
from onnxscript.optimizer import basic_constant_propagation
from onnxscript.rewriter.pattern import RewriteRule

from optimc_passes.fuse.graph_names import GraphNames
from optimc_passes.fuse.recorder import Recorder
from optimc_passes.graph.weight_tensor import WeightTensor

_SHARED_BYTES = 4096
"""Constants up to this size are compared, so that equal ones are stored once."""


def apply_rules(
    model: ir.Model,
    groups: Sequence[Sequence[RewriteRule]],
    recorder: Recorder,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> None:
    """Rewrite `model` in place: each group of rules once over the graph, at each node the first rule that fits.

    What a rewrite builds is not matched again by its own group. Constants become initializers, equal ones shared; what
    nobody reads any more is removed at once, so that "has another reader" means a living one.
    """
    graph = model.graph
    names, constants = GraphNames(graph), _Constants(graph)
    for index, group in enumerate(groups):
        nodes = tuple(graph)
        for position, node in enumerate(nodes):
            if position % 64 == 0:
                progress(index * len(nodes) + position, len(groups) * len(nodes))
            for rule in group:
                # A node may have gone with an earlier match.
                if node.graph is not graph or _fires(model, rule, node, recorder, names, constants):
                    break
    progress(len(groups), len(groups))
    restore_order(graph)


def remove_unread(node: ir.Node) -> None:
    """Remove the node if nobody reads it, then what only it read, initializers included."""
    graph = node.graph
    stack = [node]
    while stack:
        current = stack.pop()
        if (
            graph is None
            or current.graph is not graph
            or any(value.uses() or value.is_graph_output() for value in current.outputs)
        ):
            continue
        read = [value for value in current.inputs if value is not None]
        assert isinstance(graph, ir.Graph)
        graph.remove(current, safe=True)
        for value in read:
            producer = value.producer()
            if producer is not None:
                stack.append(producer)
            elif value.is_initializer() and not (value.uses() or value.is_graph_output() or value.is_graph_input()):
                graph.initializers.pop(value.name or "", None)


def restore_order(graph: ir.Graph) -> None:
    """Sort the nodes if one stands before something it reads."""
    seen: set[ir.Value] = set()
    for node in graph:
        if any(value is not None and value.producer() is not None and value not in seen for value in node.inputs):
            graph.sort()
            return
        seen.update(node.outputs)


def _fires(
    model: ir.Model, rule: RewriteRule, node: ir.Node, recorder: Recorder, names: GraphNames, constants: _Constants
) -> bool:
    """Try one rule at one node; return whether the graph changed."""
    built = rule.try_rewrite(model, model.graph, node, tracer=recorder)
    if built is None:
        return False
    graph = model.graph
    old, new = list(built.match.outputs), list(built.new_outputs)
    taken_over = [value.name for value in old]
    for value in old:
        if not value.is_graph_output():
            value.name = None
    wished = [value.name or "constant" for value in built.new_initializers]
    for value, name in zip(built.new_initializers, wished, strict=True):
        names.claim(value, name)
        graph.register_initializer(value)
    nodes = [made for made in built.new_nodes if not constants.take(made, names)]
    for before, after, name in zip(old, new, taken_over, strict=True):
        if after.producer() in nodes:
            before.name, after.name = None, name
            after.shape = before.shape if before.shape is not None else after.shape
            after.type = before.type if before.type is not None else after.type
        elif before.is_graph_output():
            raise ValueError(f"{rule.name}: an output of the graph needs a node of its own; emit an Identity")
    _inherit_metadata(built.match.nodes, nodes)
    wishes = [(made.name, [value.name for value in made.outputs]) for made in nodes]
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    graph.insert_after(node, nodes)
    for matched in (node, *built.match.nodes):
        remove_unread(matched)
    for value, name in zip(built.new_initializers, wished, strict=True):
        names.claim(value, name)  # which may have become free
    names.settle(nodes, wishes, prefix=(taken_over[0] or "").rpartition("/")[0])
    return True


def _inherit_metadata(matched: Sequence[ir.Node], built: Sequence[ir.Node]) -> None:
    """Hand on what the exporter wrote to nodes: the module they come from."""
    metadata: dict[str, str] = {}
    for node in matched:
        for key, text in node.metadata_props.items():
            metadata.setdefault(key, text)
    for node in built:
        node.metadata_props.update(metadata)


class _Constants:
    """The small constants of a graph by content."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._known: dict[tuple[ir.DataType, tuple[int, ...], bytes], ir.Value] = {}
        for value in graph.initializers.values():
            tensor = value.const_value
            if tensor is not None and not isinstance(tensor, WeightTensor) and tensor.nbytes <= _SHARED_BYTES:
                self._known.setdefault(_content(tensor), value)

    def take(self, node: ir.Node, names: GraphNames) -> bool:
        """If the node is a new Constant, let its users read an initializer; an equal one that exists is used again."""
        if node.op_type != "Constant" or node.domain:
            return False
        (output,) = node.outputs
        basic_constant_propagation([node])
        tensor = output.const_value
        assert tensor is not None, node
        known = self._known.get(_content(tensor))
        if known is None or self._graph.initializers.get(known.name or "") is not known:
            known = ir.Value(shape=ir.Shape(tensor.shape.numpy()), type=ir.TensorType(tensor.dtype), const_value=tensor)
            names.claim(known, "constant")
            self._graph.register_initializer(known)
            self._known[_content(tensor)] = known
        ir.convenience.replace_all_uses_with(output, known)
        return True


def _content(tensor: ir.TensorProtocol) -> tuple[ir.DataType, tuple[int, ...], bytes]:
    return tensor.dtype, tuple(tensor.shape.numpy()), tensor.tobytes()
