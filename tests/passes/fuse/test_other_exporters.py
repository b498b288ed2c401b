"""A decoder as another exporter writes it, at opset 17: norms and rotations are arithmetic, each layer has tables."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from optimc_passes.artifact import Artifact
from optimc_passes.dialect import verify_graph
from optimc_passes.fuse.pipeline import GRAPH_PASSES
from optimc_passes.fuse.rule import NoOptions
from optimc_passes.graph.attach import attach_weights
from optimc_passes.graph.shapes import annotate, inferred
from optimc_passes.verify.evaluate import evaluate
from optimc_passes.verify.numeric import TOLERANCE, relative_error
from optimc_passes.verify.probe import Probe
from optimc_passes.weights import Dense, WeightStore

LAYERS, VOCAB, HIDDEN, INTERMEDIATE = 2, 12, 8, 6
PARAMETERS = {"embed": (VOCAB, HIDDEN), "norm": (HIDDEN,), "head": (VOCAB, HIDDEN)} | {
    f"l{layer}_w_{name}": shape
    for layer in range(LAYERS)
    for name, shape in {
        "attn_norm": (HIDDEN,),
        "mlp_norm": (HIDDEN,),
        "q": (HIDDEN, HIDDEN),
        "k": (4, HIDDEN),
        "v": (4, HIDDEN),
        "o": (HIDDEN, HIDDEN),
        "gate": (INTERMEDIATE, HIDDEN),
        "up": (INTERMEDIATE, HIDDEN),
        "down": (HIDDEN, INTERMEDIATE),
    }.items()
}


def _norm(x: str, scale: str, y: str) -> str:
    return f"""{y}_square = Pow ({x}, two)
        {y}_mean = ReduceMean <axes = [-1]> ({y}_square)
        {y}_variance = Add ({y}_mean, epsilon)
        {y}_root = Sqrt ({y}_variance)
        {y}_normed = Div ({x}, {y}_root)
        {y} = Mul ({scale}, {y}_normed)"""


def _linear(x: str, weight: str, y: str) -> str:
    return f"""{y}_w = Transpose <perm = [1, 0]> ({weight})
        {y} = MatMul ({x}, {y}_w)"""


def _rotate(x: str, heads: int, table: str, y: str) -> str:
    return f"""{y}_heads = Reshape ({x}, heads{heads})
        {y}_first = Transpose <perm = [0, 2, 1, 3]> ({y}_heads)
        {y}_low, {y}_high = Split <axis = -1> ({y}_first)
        {y}_negated = Neg ({y}_high)
        {y}_turned = Concat <axis = -1> ({y}_negated, {y}_low)
        {y}_left = Mul ({y}_first, {table}_cos)
        {y}_right = Mul ({y}_turned, {table}_sin)
        {y}_sum = Add ({y}_left, {y}_right)
        {y}_back = Transpose <perm = [0, 2, 1, 3]> ({y}_sum)
        {y} = Reshape ({y}_back, packed{heads})"""


def _table(y: str) -> str:
    return f"""{y}_column = Unsqueeze (position_ids, outer)
        {y}_short = Cast <to = 6> ({y}_column)
        {y}_real = Cast <to = 1> ({y}_short)
        {y}_angles = Mul ({y}_real, frequencies)
        {y}_twice = Concat <axis = -1> ({y}_angles, {y}_angles)
        {y}_cosine = Cos ({y}_twice)
        {y}_sine = Sin ({y}_twice)
        {y}_cos = Unsqueeze ({y}_cosine, one)
        {y}_sin = Unsqueeze ({y}_sine, one)"""


def _layer(index: int) -> str:
    layer, x = f"l{index}", f"x{index}"
    attention = (
        f"layer = {index}, num_heads = 2, num_kv_heads = 1, head_dim = 4, scale = 0.5, window = 0, softcap = 0.0"
    )
    return f"""{_norm(x, f"{layer}_w_attn_norm", f"{layer}_n")}
        {_linear(f"{layer}_n", f"{layer}_w_q", f"{layer}_q")}
        {_linear(f"{layer}_n", f"{layer}_w_k", f"{layer}_k")}
        {_linear(f"{layer}_n", f"{layer}_w_v", f"{layer}_v")}
        {_table(layer)}
        {_rotate(f"{layer}_q", 2, layer, f"{layer}_qr")}
        {_rotate(f"{layer}_k", 1, layer, f"{layer}_kr")}
        {layer}_vr = Reshape ({layer}_v, packed1)
        {layer}_a = optimc.PagedAttention <{attention}> ({layer}_qr, {layer}_kr, {layer}_vr)
        {layer}_b = Reshape ({layer}_a, batch)
        {_linear(f"{layer}_b", f"{layer}_w_o", f"{layer}_o")}
        {layer}_s = Add ({x}, {layer}_o)
        {_norm(f"{layer}_s", f"{layer}_w_mlp_norm", f"{layer}_m")}
        {_linear(f"{layer}_m", f"{layer}_w_gate", f"{layer}_gate")}
        {_linear(f"{layer}_m", f"{layer}_w_up", f"{layer}_up")}
        {layer}_sigmoid = Sigmoid ({layer}_gate)
        {layer}_silu = Mul ({layer}_gate, {layer}_sigmoid)
        {layer}_gated = Mul ({layer}_up, {layer}_silu)
        {_linear(f"{layer}_gated", f"{layer}_w_down", f"{layer}_down")}
        x{index + 1} = Add ({layer}_down, {layer}_s)"""


def _model() -> ir.Model:
    parameters = ", ".join(f"float[{','.join(map(str, shape))}] {name}" for name, shape in PARAMETERS.items())
    text = f"""<ir_version: 10, opset_import: ["" : 17, "optimc" : 1]>
    decoder (int64[T] input_ids, int64[T] position_ids, int64[R] logits_rows, {parameters}) => (float[R,{VOCAB}] logits)
    <float two = {{2}}, float epsilon = {{0.001}}, int64[1] zero = {{0}}, int64[1] one = {{1}},
     int64[2] outer = {{0, 2}},
     int64[4] heads2 = {{1, -1, 2, 4}}, int64[4] heads1 = {{1, -1, 1, 4}}, int64[2] packed2 = {{-1, 8}},
     int64[2] packed1 = {{-1, 4}}, int64[3] batch = {{1, -1, 8}}, float[2] frequencies = {{1, 0.1}}> {{
        ids = Unsqueeze (input_ids, zero)
        x0 = Gather (embed, ids)
        {_layer(0)}
        {_layer(1)}
        {_norm(f"x{LAYERS}", "norm", "last")}
        asked = Gather <axis = 1> (last, logits_rows)
        {_linear("asked", "head", "scores")}
        logits = Squeeze (scores, zero)
    }}"""
    model = ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text)))
    # ONNX knows the types; ours keeps T through a Reshape.
    for node in model.graph:
        for value in node.outputs:
            value.shape = None
    annotate(model, inferred(model))
    return model


@pytest.fixture(scope="module")
def attached() -> ir.Model:
    rng = np.random.default_rng(0)
    store = {
        name: Dense.of(
            rng.uniform(0.5, 2, shape).astype(np.float32)
            if len(shape) == 1
            else (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)
        )
        for name, shape in PARAMETERS.items()
    }
    return attach_weights(_model(), WeightStore(store))


def test_it_becomes_what_our_own_export_becomes(attached):
    store: Any = {}
    artifact = Artifact("0" * 64, SimpleNamespace(weights=store), store, graph=attached)
    fired = {}
    for pass_type in GRAPH_PASSES:
        outcome = pass_type(NoOptions())(artifact)
        artifact = outcome.artifact
        fired[pass_type.name] = outcome.report.metrics["matched"]
    assert {name: count for name, count in fired.items() if count} == {
        "clean_casts": LAYERS,
        "rms_norm": 2 * LAYERS + 1,
        "rope": 4 * LAYERS,  # two rotations a layer, and the transposes around each
        "share_rotary_tables": 2 * LAYERS - 1,
        "merge_qkv": LAYERS,
        "merge_gate_up": LAYERS,
        "swiglu": LAYERS,
        "gather_rows_early": 1,
        "drop_batch_axis": 1,
        "rotary_qkv": LAYERS,
        "add_rms_norm": 2 * LAYERS,
    }
    graph = artifact.graph
    assert len(graph.graph) == 9 * LAYERS + 10
    graph.opset_imports[""] = 23
    assert verify_graph(graph) == []
    probe = Probe.of_vocabulary(VOCAB, 20).with_scattered_rows()
    before, after = evaluate(attached, probe), evaluate(graph, probe)
    assert relative_error(before, after) < TOLERANCE
