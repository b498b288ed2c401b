"""What has no kernel fails by the node's name, with the reason and the target that can."""

import ml_dtypes
import numpy as np
import pytest

from optimc.errors import LoweringError
from optimc_passes.emit import TARGETS, LoweringOptions
from optimc_passes.graph.attach import attach_weights
from optimc_passes.weights import Dense, WeightStore


def refused(small_graph, lowered, edit, **parts):
    with pytest.raises(LoweringError) as error:
        lowered(small_graph(before=edit, **parts).model)
    return str(error.value)


def test_the_message_names_node_shapes_reason_and_the_other_target(small_graph, lowered):
    def edit(g, x):
        y = g.op("Softmax", x, axis=-1)
        y.producer().name = "mlp/Softmax"
        return y

    assert refused(small_graph, lowered, edit) == (
        "node 'mlp/Softmax' Softmax([1, T, 32]): the cpu target has no kernel for it (there is none of this kind); "
        "use target onnxruntime"
    )


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda g, x: g.op("MatMul", x, g.op("Transpose", x, perm=[0, 2, 1])), "there is none of this kind"),
        (lambda g, x: g.op("MatMul", x, x), "two activations are multiplied"),
        (lambda g, x: g.op("Reshape", x, g.ints(-1, 8)), "mixes rows of 32 elements"),
        (lambda g, x: g.op("Slice", x, g.ints(0), g.ints(1), g.ints(1)), "axis 1 is no axis of a row"),
        (lambda g, x: g.op("Slice", x, g.ints(0), g.ints(8), g.ints(2), g.ints(2)), "steps [2]"),
        (lambda g, x: g.op("Cast", x, to=10), "to FLOAT16; activations are float32"),
        (lambda g, x: g.op("Add", x, g.weight("wide", 3, 32)), "not one value per element of a row of [32]"),
        (lambda g, x: g.op("Mul", x, g.scalar(np.inf)), "a constant is inf"),
        (lambda g, x: g.op("Gather", g.weight("positions", 64, 32), g.inputs[1]), "this kind of lookup is not known"),
        (lambda g, x: g.op("Add", x, g.op("Cast", g.inputs[1], to=1)), "positions only become"),
        (lambda g, x: g.op("Gather", x, g.ints(0, 0, 1), axis=-1), "features are only reordered"),
        (lambda g, x: g.op("RMSNormalization", x, g.op("Tanh", x), axis=-1), "weight and bias of a norm are constants"),
        (lambda g, x: g.op("Gather", x, g.inputs[2], axis=2), "logits_rows picks tokens"),
        (lambda g, x: g.op("MatMul", x, g.weight("other", 16, 32)), "rows of [32] meet 16 input features"),
    ],
)
def test_reasons(small_graph, lowered, edit, reason):
    assert reason in refused(small_graph, lowered, edit)


def test_a_rotation_outside_attention(small_graph, lowered):
    def edit(g, x):
        positions = g.op("Cast", g.op("Unsqueeze", g.inputs[1], g.ints(0, 2)), to=1)
        angles = g.op("Mul", positions, g.weight("frequencies", 4))
        turned = g.op("RotaryEmbedding", x, g.op("Cos", angles), g.op("Sin", angles), num_heads=4)
        return g.op("Add", x, turned)

    assert "rotated heads only reach attention" in refused(small_graph, lowered, edit)


def test_sines_of_other_angles(small_graph, lowered):
    def edit(g, x):
        positions = g.op("Cast", g.op("Unsqueeze", g.inputs[1], g.ints(0, 2)), to=1)
        cos, sin = (g.op(name, g.op("Mul", positions, g.weight(f"{name}.frequencies", 4))) for name in ("Cos", "Sin"))
        return g.op("RotaryEmbedding", x, cos, sin, num_heads=4)

    assert "cosines and sines are not of the same angles" in refused(small_graph, lowered, edit)


def test_logits_of_all_tokens(small_graph, lowered):
    model = small_graph().model
    gather = next(node for node in model.graph if node.op_type == "Gather" and node.inputs[1].name == "logits_rows")
    gather.outputs[0].replace_all_uses_with(gather.inputs[0])
    with pytest.raises(
        LoweringError, match=r"output 'logits' \[T, 40\]: the cpu target wants rows picked by logits_rows"
    ):
        lowered(model)


def test_a_second_answer(small_graph, lowered):
    model = small_graph().model
    model.graph.outputs.append(next(node for node in model.graph if node.op_type == "MatMul").outputs[0])
    with pytest.raises(LoweringError, match="the cpu target answers logits alone"):
        lowered(model)


def test_parameters_without_weights(tiny_decoder, lowered):
    with pytest.raises(LoweringError, match="a parameter without a weight"):
        lowered(tiny_decoder().model)


def test_a_pool_dtype_without_kernels():
    options = LoweringOptions(16, None, "group", "fp8", 64, 4)
    assert list(TARGETS["cpu"].check_options(options)) == ["kv_dtype"]
    for dtype in ("float32", "bfloat16", "int8", "int4"):
        assert TARGETS["cpu"].check_options(LoweringOptions(16, None, "row", dtype, 64, 4)) == {}


@pytest.mark.parametrize("tied", [False, True])
def test_weights_of_half_size_stay_so_and_a_tied_one_lies_in_the_plan_once(tiny_decoder, lowered, compare, tied):
    decoder = tiny_decoder(tied=tied)
    halves = {name: array.astype(ml_dtypes.bfloat16) for name, array in decoder.arrays.items()}
    model = attach_weights(decoder.model, WeightStore({name: Dense.of(array) for name, array in halves.items()}))
    program = lowered(model)
    weights = program.program["weights"]
    (embed,) = (op for op in program.program["ops"] if op["op"] == "embed")
    head = [op for op in program.program["ops"] if op["op"] == "linear"][-1]
    assert weights[embed["table"]]["kind"] == ("float" if tied else "table")
    assert (embed["table"] == head["weight"]) == tied
    assert sum(entry["kind"] == "table" for entry in weights.values()) == (not tied)
    assert {entry["dtype"] for entry in weights.values() if "dtype" in entry} == {"bfloat16"}
    assert compare(model, program) < 1e-5


def test_the_pool_is_what_the_options_ask_for(small_graph, lowered):
    kv = lowered(small_graph().model, kv_dtype="int8", block_size=32).kv
    assert (kv.dtype, kv.block_size) == ("int8", 32)
    assert [(layer.num_kv_heads, layer.head_dim, layer.window) for layer in kv.layers] == [(2, 8, 0)]


def test_a_foreign_operator(small_graph, lowered):
    message = refused(small_graph, lowered, lambda g, x: g.op("Fast", x, domain="vendor"))
    assert "vendor::Fast([1, T, 32])" in message
