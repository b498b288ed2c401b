"""Readable, reproducible names: nodes and values carry the path of the module they come from."""

from __future__ import annotations

import ast
import re
from collections import Counter

import onnx_ir as ir

_SCOPES = "pkg.torch.onnx.name_scopes"
"""Metadata of the exporter: the list of module paths around a node, outermost first, the operator last."""


def rename(graph: ir.Graph, wrapper: str) -> None:
    """Sort the nodes by need, name them `<module path>/<operator>`, their outputs likewise, constants `constant_<n>`.

    Graph inputs and outputs keep their names. `wrapper` is the attribute under which the exported module held the
    model; it is dropped from every path. Metadata is removed: it holds this machine's paths and dwarfs the graph.
    """
    _sort_by_need(graph)
    kept = {value.name for value in (*graph.inputs, *graph.outputs)}
    for index, value in enumerate(list(graph.initializers.values())):
        value.name = f"constant_{index}"
        assert value.const_value is not None
        value.const_value.name = value.name
    taken: Counter[str] = Counter()
    for node in graph:
        name = "/".join(filter(None, (_module_path(node, wrapper), node.op_type)))
        taken[name] += 1
        if taken[name] > 1:
            name = f"{name}_{taken[name]}"
        node.name = name
        for index, output in enumerate(node.outputs):
            if output.name not in kept:
                output.name = f"{name}:{index}" if index else name
            output.metadata_props.clear()
        node.metadata_props.clear()
        node.doc_string = None


def _module_path(node: ir.Node, wrapper: str) -> str:
    scopes = ast.literal_eval(node.metadata_props.get(_SCOPES, "[]"))
    path = scopes[-2] if len(scopes) > 1 else ""
    return re.sub(rf"^{re.escape(wrapper)}(\.|$)", "", path)


def _sort_by_need(graph: ir.Graph) -> None:
    """Put each node right before the first one that needs it, walking back from the outputs; constants likewise.

    The order depends on the graph alone, so two exports of one model are equal even where the model's own code walks
    a set.
    """
    order: list[ir.Node] = []
    constants: list[ir.Value] = []
    seen: set[int] = set()
    stack: list[tuple[ir.Value | ir.Node, bool]] = [(value, False) for value in reversed(graph.outputs)]
    while stack:
        item, expanded = stack.pop()
        if isinstance(item, ir.Value):
            node = item.producer()
            if node is not None:
                stack.append((node, False))
            elif id(item) not in seen and item.is_initializer():
                seen.add(id(item))
                constants.append(item)
        elif expanded:
            order.append(item)
        elif id(item) not in seen:
            seen.add(id(item))
            stack.append((item, True))
            stack.extend((value, False) for value in reversed(item.inputs) if value is not None)
    assert len(order) == len(graph), "dead nodes were removed before"
    graph.remove(order)
    graph.extend(order)
    graph.initializers.clear()
    for value in constants:
        graph.register_initializer(value)
