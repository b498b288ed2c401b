"""The names of a graph while rules rewrite it: what means the same keeps its name, what is new gets a speaking one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir


class GraphNames:
    """Who has which name. A name is free again once its holder has left the graph or got another."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._values: dict[str | None, ir.Value] = {}
        self._nodes: dict[str | None, ir.Node] = {}
        for value in (*graph.inputs, *graph.initializers.values()):
            self._values[value.name] = value
        for node in graph:
            self._nodes[node.name] = node
            self._values.update((value.name, value) for value in node.outputs)

    def claim(self, value: ir.Value, name: str) -> None:
        """Give `value` this name, or one like it if another value has it."""
        value.name = _free(name, lambda candidate: self._holder(candidate) in (None, value))
        self._values[value.name] = value
        if value.const_value is not None:
            value.const_value.name = value.name

    def settle(
        self, nodes: Sequence[ir.Node], wishes: Sequence[tuple[str | None, Sequence[str | None]]], prefix: str
    ) -> None:
        """Name new nodes and their outputs as wished, else "<prefix>/<operator>"; a node like its first output."""
        for node, (wished_node, names) in zip(nodes, wishes, strict=True):
            if node.graph is not self._graph:
                continue  # built and used by nobody
            default = f"{prefix}/{node.op_type}" if prefix else node.op_type
            for index, (value, wish) in enumerate(zip(node.outputs, names, strict=True)):
                if not value.is_graph_output():
                    self.claim(value, wish or (f"{default}:{index}" if index else default))
            self._claim_node(node, wished_node or node.outputs[0].name or default)

    def _claim_node(self, node: ir.Node, name: str) -> None:
        node.name = _free(name, lambda candidate: self._node(candidate) in (None, node))
        self._nodes[node.name] = node

    def _holder(self, name: str) -> ir.Value | None:
        value = self._values.get(name)
        if value is None or value.name != name:
            return None
        producer = value.producer()
        if producer is not None:
            return value if producer.graph is self._graph else None
        return value if value.is_graph_input() or self._graph.initializers.get(name) is value else None

    def _node(self, name: str) -> ir.Node | None:
        node = self._nodes.get(name)
        return node if node is not None and node.name == name and node.graph is self._graph else None


def _free(name: str, is_free: Callable[[str], bool]) -> str:
    candidate, count = name, 1
    while not is_free(candidate):
        count += 1
        candidate = f"{name}_{count}"
    return candidate
