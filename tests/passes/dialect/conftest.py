"""Graphs of attention alone: q, k and v are graph inputs, so tests choose every number."""

from collections.abc import Callable

import onnx_ir as ir
import pytest
from onnx_ir.tape import Tape

from optimc_passes.dialect import DOMAIN, DOMAIN_VERSION, OP_TYPE, PagedAttention


def _attention_graph(*specs: PagedAttention) -> ir.Model:
    """One node per spec, side by side; layer i reads q_i, k_i, v_i and writes out_i."""
    tape = Tape()
    inputs = [ir.Value(name="input_ids", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(["T"]))]
    outputs = []
    for spec in specs:
        operands = [
            ir.Value(name=f"{letter}_{spec.layer}", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["T", width]))
            for letter, width in (("q", spec.q_width), ("k", spec.kv_width), ("v", spec.kv_width))
        ]
        attributes = {
            name: getattr(spec, name)
            for name in ("layer", "num_heads", "num_kv_heads", "head_dim", "scale", "window", "softcap")
        }
        out = tape.op(OP_TYPE, operands, attributes, domain=DOMAIN)
        out.name, out.type, out.shape = f"out_{spec.layer}", operands[0].type, operands[0].shape
        inputs += operands
        outputs.append(out)
    graph = ir.Graph(
        inputs, outputs, nodes=tape.nodes, opset_imports={"": 23, DOMAIN: DOMAIN_VERSION}, name="attention"
    )
    return ir.Model(graph, ir_version=10)


@pytest.fixture
def attention_graph() -> Callable[..., ir.Model]:
    return _attention_graph
