"""Where do two graphs part that should compute the same? Found by bisection over the values between their nodes.

Values are the same by name: a rewrite that keeps a value's meaning keeps its name, and gives a new name to what means
something else. A *cut* is a place between two nodes of the rewritten graph where everything that is computed from the
inputs and still needed has a namesake in the original: in a decoder the residual stream, with the tables of the rotary
embedding. If all values at a cut are equal, whatever differs is computed after it. So cuts are bisected, each with a
run of both graphs up to it; then the values between the last equal cut and the next are looked at one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray

from optimc.wording import listed
from optimc_passes.graph.shapes import is_unknown
from optimc_passes.verify.numeric import relative_error

Run = Callable[[ir.Model, Sequence[str]], dict[str, NDArray[Any]]]
"""Computes the values of these names."""


@dataclass(frozen=True)
class Divergence:
    """The first node, in the order of the rewritten graph, whose value differs."""

    node: str
    """Its name; the name of its value if it has none."""
    op: str
    value: str
    error: float
    """Largest difference over the largest magnitude of its row."""
    through: tuple[str, ...] = ()
    """Nodes before it whose values have no namesake in the original graph, from the last equal values on."""
    equal: tuple[str, ...] = ()
    """The nearest values before it that have one and are equal."""

    def __str__(self) -> str:
        text = f"first at node '{self.node}' {self.op}, whose '{self.value}' is off by {self.error:.3g}"
        if self.through:
            text += f", through new nodes {_quoted(self.through)}"
        if self.equal:
            text += f"; {_quoted(self.equal)} {'is' if len(self.equal) == 1 else 'are'} still equal"
        return text


@dataclass(frozen=True)
class Cut:
    """The place after a node of the rewritten graph."""

    position: int
    """Index of that node."""
    names: tuple[str, ...]
    """Values that are computed up to there and needed after it."""


def first_divergence(before: ir.Model, after: ir.Model, run: Run, tolerance: float) -> Divergence:
    """Return where `after`, whose outputs differ from those of `before`, starts to differ.

    Both are graphs of the dialect. If nothing between them can be compared, the node of the first output is named.
    """
    order = list(after.graph)
    shared = comparable_names(before.graph, after.graph)

    def differing(names: Sequence[str]) -> dict[str, float]:
        left, right = run(before, names), run(after, names)
        errors = {name: relative_error(left[name], right[name]) for name in names}
        return {name: error for name, error in errors.items() if not error <= tolerance}

    cuts = find_cuts(after.graph, shared)
    low, high = -1, len(cuts)  # before the first node all is equal, at the end it is not
    while high - low > 1:
        middle = (low + high) // 2
        if differing(cuts[middle].names):
            high = middle
        else:
            low = middle
    first = cuts[low].position + 1 if low >= 0 else 0
    last = cuts[high].position + 1 if high < len(cuts) else len(order)
    between = [value.name for node in order[first:last] for value in node.outputs if value.name in shared]
    errors = differing([name for name in between if name is not None])
    for node in order[first:last]:
        for value in node.outputs:
            if value.name is not None and value.name in errors:
                return _divergence(after.graph, node, value, errors[value.name], shared)
    output = after.graph.outputs[0]
    last_node = output.producer()
    assert last_node is not None, "a graph of the dialect computes its outputs"
    return _divergence(after.graph, last_node, output, float("nan"), shared)


def comparable_names(before: ir.Graph, after: ir.Graph) -> frozenset[str]:
    """Return names of values that both graphs compute with the same shape, axes of size 1 apart, as far as declared."""
    old = {value.name: value for node in before for value in node.outputs if value.name}
    new = {value.name: value for node in after for value in node.outputs if value.name}
    return frozenset(name for name, value in new.items() if name in old and _may_equal(old[name], value))


def find_cuts(graph: ir.Graph, shared: frozenset[str]) -> list[Cut]:
    """Return the cuts all of whose values are in `shared`, in graph order; of neighbours, only the narrowest."""
    order = list(graph)
    outputs = set(graph.outputs)
    position = {node: index for index, node in enumerate(order)}
    computed = _computed_from_inputs(graph)
    live: dict[ir.Value, int] = {}
    """Values computed from the inputs, with the index of the last node that needs them."""
    places: list[tuple[str, ...]] = []
    for index, node in enumerate(order):
        for value in node.outputs:
            if value in computed:
                # A node taken out of the graph may still hold on to what it read.
                ends = [position[user] for user, _ in value.uses() if user in position]
                live[value] = len(order) if value in outputs else max(ends, default=index)
        live = {value: end for value, end in live.items() if end > index}
        places.append(tuple(str(value.name) for value in live))
    widths = [len(names) if names and shared.issuperset(names) else len(order) for names in places]
    return [
        Cut(index, places[index])
        for index, width in enumerate(widths[:-1])
        if width < len(order) and width <= min(widths[max(index - 1, 0)], widths[index + 1])
    ]


def _computed_from_inputs(graph: ir.Graph) -> set[ir.Value]:
    """Return what the nodes compute from the graph's inputs; the rest they compute from weights alone."""
    found = set(graph.inputs)
    for node in graph:
        if any(value in found for value in node.inputs if value is not None):
            found |= set(node.outputs)
    return found - set(graph.inputs)


def _may_equal(left: ir.Value, right: ir.Value) -> bool:
    if left.shape is None or right.shape is None:
        return True
    shapes = [[dim for dim in shape if dim != 1] for shape in (left.shape, right.shape)]
    if any(is_unknown(dim) for shape in shapes for dim in shape):
        return True
    return shapes[0] == shapes[1]


def _divergence(graph: ir.Graph, node: ir.Node, value: ir.Value, error: float, shared: frozenset[str]) -> Divergence:
    """Describe a node that differs, with the way to it from the nearest values that are equal."""
    computed = _computed_from_inputs(graph)
    equal: dict[str, None] = {}
    through: dict[str, None] = {}
    waiting = list(node.inputs)
    seen: set[ir.Value] = set()
    while waiting:
        source = waiting.pop(0)
        producer = source.producer() if source is not None else None
        if source is None or producer is None or source not in computed or source in seen:
            continue
        seen.add(source)
        if source.name in shared:
            equal[str(source.name)] = None
            continue
        through[_name(producer)] = None
        waiting += producer.inputs
    return Divergence(_name(node), node.op_type, str(value.name), error, tuple(through), tuple(equal))


def _name(node: ir.Node) -> str:
    return node.name or str(node.outputs[0].name)


def _quoted(names: Sequence[str]) -> str:
    return listed([f"'{name}'" for name in names])
