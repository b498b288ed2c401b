"""Finding our node in what TensorRT says: it names layers and tensors, which bear the names of the graph's."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import onnx_ir as ir

NOISE = ("cudaError 35", "CUDA driver version is insufficient", "CUDA initialization failure")
"""In messages of a builder that runs without a driver, which it may."""

_PARSER_LOG = "ModelImporter.cpp:"
_WORD = re.compile(r"[^\s()\[\]{},;:'\"=]+")
_VALUE = re.compile(r"(?:[Tt]ensor:?|[Cc]onstant|[Ww]eight) \(?([^\s(),;]+)")
"""Names of values are looked for only where one must stand: some are words."""
_TOO_LARGE = ("OutOfMemory", "Volume exceeds limit")
"""In messages about shapes, which nobody sees in a node: they are those of the recipe's limits."""
_MOST_QUOTED = 300
"""Characters of a message: some of TensorRT's print the whole call stack."""


def describe(node: ir.Node) -> str:
    """Return a node as errors name it."""
    return f"node '{node.name}' {node.domain or 'onnx'}::{node.op_type}"


def find_culprit(graph: ir.Graph, texts: Iterable[str]) -> ir.Node | None:
    """Return the first node that a text names, itself or by its output or a weight only it reads; None if none does.

    A text that names nothing, but says which kind of layer it is about, is about the first node of that operator.
    """
    nodes = {node.name: node for node in graph if node.name}
    values = {value.name: node for node in graph for value in node.outputs if value.name}
    weights = {
        name: users[0].node for name, value in graph.initializers.items() if len(users := tuple(value.uses())) == 1
    }
    texts = tuple(texts)
    for known, names in ((nodes, _WORD), (values, _VALUE), (weights, _VALUE)):
        for text in texts:
            for word in names.findall(text):
                if (found := known.get(word) or known.get(word.rstrip("."))) is not None:
                    return found
    operators = {node.op_type: node for node in reversed(tuple(graph))}
    return next((node for text in texts for name, node in operators.items() if f"{name} operation" in text), None)


def build_problem(graph: ir.Graph, title: str, errors: Sequence[str]) -> str:
    """Return a sentence on why TensorRT refuses the graph, with our node first."""
    node = find_culprit(graph, errors)
    place = "" if node is None else f"{describe(node)}: "
    said = "; ".join(dict.fromkeys(filter(None, map(_essence, errors)))) or "it gave no reason"
    advice = "; lower limits max_seqs, max_step_tokens or max_seq_len" if any(why in said for why in _TOO_LARGE) else ""
    return f"{place}{title} cannot build the graph: {said}{advice}"


def _essence(text: str) -> str:
    """Leave out what is no reason, and where in TensorRT's own sources something was found."""
    if text.startswith(_PARSER_LOG):
        return ""  # the parser's errors say it again
    lines = [line for line in text.splitlines() if not any(noise in line for noise in NOISE)]
    text = re.sub(r"\s*In \w+ at /_src/[^\s)]+|\[\w+\.(cpp|h)[^\]]*\]\s*", "", " ".join(" ".join(lines).split()))
    return text if len(text) <= _MOST_QUOTED else f"{text[:_MOST_QUOTED]}…"
