"""Whether ONNX Runtime can run every node, asked of ONNX Runtime itself before a weight is loaded."""

from __future__ import annotations

import re

import onnx_ir as ir

from optimc.errors import LoweringError, MissingExtraError
from optimc.wording import one_line
from optimc_passes.dialect.weightless import without_weights

_NODE_NAMES = (re.compile(r"node with name '([^']+)'"), re.compile(r"In Node, \(\"([^\"]+)\""))
"""How ONNX Runtime names a node it has no kernel for, and one it does not understand."""


def check_kernels(model: ir.Model) -> None:
    """Create a session over the graph with weights as inputs; it resolves a kernel for every node.

    Raises LoweringError naming the node that has none, MissingExtraError if ONNX Runtime is not installed.
    """
    for node in model.graph:
        if node.domain:
            raise LoweringError(
                f"node '{node.name}' {node.domain}::{node.op_type}: the onnxruntime target runs standard ONNX only"
            )
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingExtraError("onnxruntime", "build", "lowering for the onnxruntime target") from error
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    proto = ir.to_proto(without_weights(model)).SerializeToString()
    try:
        onnxruntime.InferenceSession(proto, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's exceptions have no public common base below Exception
        detail = one_line(error)
        raise LoweringError(
            f"{_culprit(model, detail)}onnxruntime {onnxruntime.__version__} cannot run the graph: {detail}"
        ) from error


def _culprit(model: ir.Model, detail: str) -> str:
    for pattern in _NODE_NAMES:
        match = pattern.search(detail)
        node = next((node for node in model.graph if match is not None and node.name == match[1]), None)
        if node is not None:
            return f"node '{node.name}' onnx::{node.op_type}: "
    return ""
