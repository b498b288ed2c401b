"""Each operator the target knows, inside a small model, against ONNX Runtime or ONNX's own reference."""

import numpy as np
import pytest


def positive(graph, x):
    return graph.op("Add", graph.op("Abs", x), graph.scalar(0.5))


UNARY = ["Neg", "Abs", "Exp", "Sigmoid", "Tanh", "Erf", "Relu", "Softplus", "Sin", "Cos", "Mish", "HardSwish", "Elu"]


@pytest.mark.parametrize("op_type", UNARY)
def test_functions_of_one_value(small_graph, lowered, compare, op_type):
    model = small_graph(before=lambda g, x: g.op(op_type, x)).model
    assert compare(model, lowered(model)) < 1e-5


@pytest.mark.parametrize("op_type", ["Sqrt", "Log", "Reciprocal"])
def test_functions_of_a_positive_value(small_graph, lowered, compare, op_type):
    model = small_graph(before=lambda g, x: g.op(op_type, positive(g, x))).model
    assert compare(model, lowered(model)) < 1e-5


@pytest.mark.parametrize("op_type", ["Add", "Sub", "Mul", "Div", "Min", "Max"])
@pytest.mark.parametrize("constant", ["number", "vector", "rows"])
def test_functions_of_two_values(small_graph, lowered, compare, op_type, constant):
    def edit(g, x):
        x = positive(g, x)
        other = {
            "number": lambda: g.scalar(0.75),
            "vector": lambda: positive(g, g.weight("vector", 1, 1, 32)),
            "rows": lambda: g.op("Exp", x),
        }
        return g.op(op_type, other[constant](), x)

    model = small_graph(before=edit).model
    assert compare(model, lowered(model)) < 1e-5


@pytest.mark.parametrize("power", [1.0, 2.0, 3.0, 0.5, -0.5, -1.0, 1.7])
def test_powers(small_graph, lowered, compare, power):
    model = small_graph(before=lambda g, x: g.op("Pow", positive(g, x), g.scalar(power))).model
    assert compare(model, lowered(model)) < 1e-5


@pytest.mark.parametrize("attributes", [{"approximate": "tanh"}, {"approximate": "none"}, {}])
def test_gelu(small_graph, lowered, compare, attributes):
    model = small_graph(before=lambda g, x: g.op("Gelu", x, **attributes)).model
    assert compare(model, lowered(model)) < 1e-5


@pytest.mark.parametrize(("low", "high"), [(-0.5, 0.25), (None, 0.25), (-0.5, None)])
def test_clip(small_graph, lowered, compare, low, high):
    def edit(g, x):
        return g.op("Clip", x, *(None if bound is None else g.scalar(bound) for bound in (low, high)))

    model = small_graph(before=edit).model
    assert compare(model, lowered(model)) < 1e-5


@pytest.mark.parametrize(("op_type", "attributes"), [("LeakyRelu", {"alpha": 0.2}), ("HardSigmoid", {"alpha": 0.3})])
def test_functions_with_a_slope(small_graph, lowered, compare, op_type, attributes):
    model = small_graph(before=lambda g, x: g.op(op_type, x, **attributes)).model
    assert compare(model, lowered(model)) < 1e-5


def test_prelu_and_a_sum_of_several(small_graph, lowered, compare):
    def edit(g, x):
        return g.op("Sum", x, g.op("PRelu", x, g.weight("slope", 32)), g.op("Exp", x))

    model = small_graph(before=edit).model
    assert compare(model, lowered(model)) < 1e-5


@pytest.mark.parametrize("biased", [False, True])
def test_layer_normalization(small_graph, lowered, compare, biased):
    def edit(g, x):
        bias = [g.weight("bias", 32)] if biased else []
        return g.op("LayerNormalization", x, g.weight("norm", 32), *bias, axis=-1, epsilon=1e-3)

    model = small_graph(before=edit).model
    assert compare(model, lowered(model)) < 1e-5


@pytest.mark.parametrize(("axis", "shape"), [(-1, (8,)), (3, (1,)), (2, (4, 8)), (-2, (8,))])
def test_norms_over_the_last_axes_of_a_row(small_graph, lowered, compare, axis, shape):
    def edit(g, x):
        heads = g.op("Reshape", x, g.ints(1, -1, 4, 8))
        normed = g.op("LayerNormalization", heads, g.weight("norm", *shape), axis=axis)
        return g.op("Reshape", normed, g.ints(1, -1, 32))

    model = small_graph(before=edit).model
    assert compare(model, lowered(model)) < 1e-5


def test_a_vector_is_spread_over_heads(small_graph, lowered, compare):
    def edit(g, x):
        heads = g.op("Reshape", x, g.ints(1, -1, 4, 8))
        scaled = g.op("Add", g.op("Mul", heads, g.weight("per_place", 8)), g.weight("per_head", 4, 1))
        return g.op("Reshape", scaled, g.ints(1, -1, 32))

    model = small_graph(before=edit).model
    assert compare(model, lowered(model)) < 1e-5


def test_what_constants_give_is_a_constant(small_graph, lowered, compare, interpret):
    def edit(g, x):
        weight = g.op("Add", g.op("Mul", g.weight("w", 32), g.scalar(0.5)), g.op("Constant", value_float=1.0))
        return g.op("RMSNormalization", x, weight, axis=-1, epsilon=1e-6)

    model = small_graph(before=edit).model
    program = lowered(model)
    assert compare(model, program) < 1e-5
    assert "elementwise" not in {op.op for op in interpret.Interpreter(program).program.ops}


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("turned", [0, 4])
def test_rotations(lowered, small_graph, compare, interleaved, turned):
    """Queries and keys from the graph itself: the attention of `SmallGraph` is followed by one that rotates."""

    def edit(g, x):
        count = (turned or 8) // 2
        positions = g.op("Cast", g.op("Unsqueeze", g.inputs[1], g.ints(0, 2)), to=1)
        angles = g.op(
            "Mul", positions, g.constant("frequencies", np.float32(10.0) ** -np.arange(count, dtype=np.float32))
        )
        scale = g.scalar(1.25)
        cos, sin = (g.op("Mul", g.op(name, angles), scale) for name in ("Cos", "Sin"))
        q, k, v = (g.op("MatMul", x, g.weight(f"{name}2", 32, n)) for name, n in (("q", 32), ("k", 16), ("v", 16)))
        partial = {"rotary_embedding_dim": turned} if turned else {}
        q, k = (
            g.op("RotaryEmbedding", y, cos, sin, num_heads=heads, interleaved=interleaved, **partial)
            for y, heads in ((q, 4), (k, 2))
        )
        packed = [g.op("Reshape", y, g.ints(-1, n)) for y, n in ((q, 32), (k, 16), (v, 16))]
        shape = {"layer": 1, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
        out = g.op("PagedAttention", *packed, domain="optimc", **shape, scale=0.35, window=5, softcap=3.0)
        return g.op("Add", x, g.op("Reshape", out, g.ints(1, -1, 32)))

    model = small_graph(after=edit).model
    assert compare(model, lowered(model)) < 1e-5


def test_slices_and_splits_are_columns(small_graph, lowered, compare, interpret):
    def edit(g, x):
        wide = g.op("MatMul", x, g.weight("wide", 32, 64))
        part = g.op("Slice", wide, g.ints(-48), g.ints(2**62), g.ints(-1), g.ints(1))
        first, second = (g.op("Slice", part, g.ints(start), g.ints(start + 16), g.ints(2)) for start in (0, 32))
        return g.op("MatMul", g.op("Sub", first, second), g.weight("back", 16, 32))

    model = small_graph(before=edit).model
    program = lowered(model)
    assert compare(model, program) < 1e-5
    (op,) = (op for op in interpret.Interpreter(program).program.ops if op.op == "elementwise")
    assert [(view.column, view.width) for view in op.inputs] == [(16, 16), (48, 16)]
