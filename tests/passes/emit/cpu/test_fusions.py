"""What is fused and what is left alone, with the result unchanged either way."""

import numpy as np
import pytest

from optimc.plan.cpu_program import MAX_ELEMENTWISE_STEPS


def kinds(interpret, program):
    return [op.op for op in interpret.Interpreter(program).program.ops]


def linears(interpret, program):
    return [op for op in interpret.Interpreter(program).program.ops if op.op == "linear"]


def gated_mlp(activation, *, swapped=False, biased=False, half=40, extra=None):
    """An MLP whose gate and up are halves of one product; `half` is no multiple of a panel."""

    def edit(g, x):
        y = g.op("MatMul", x, g.weight("gate_up", 32, 2 * half))
        if biased:
            y = g.op("Add", y, g.weight("gate_up.bias", 2 * half))
        first, second = g.tape.op_multi_out("Split", [y], {"axis": -1, "num_outputs": 2}, num_outputs=2)
        gate, up = (second, first) if swapped else (first, second)
        product = g.op("Mul", activation(g, gate), up)
        if extra == "gate is read again":
            product = g.op("Add", product, gate)
        return g.op("Add", x, g.op("MatMul", product, g.weight("down", half, 32)))

    return edit


ACTIVATIONS = {
    "silu": lambda g, x: g.op("Mul", x, g.op("Sigmoid", x)),
    "gelu": lambda g, x: g.op("Gelu", x),
    "gelu_tanh": lambda g, x: g.op("Gelu", x, approximate="tanh"),
    "relu": lambda g, x: g.op("Relu", x),
    "sigmoid": lambda g, x: g.op("Sigmoid", x),
}


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", list(ACTIVATIONS))
def test_a_gate_ends_the_product_of_its_halves(small_graph, lowered, compare, interpret, kind, biased, swapped):
    model = small_graph(after=gated_mlp(ACTIVATIONS[kind], swapped=swapped, biased=biased)).model
    program = lowered(model)
    assert "elementwise" not in kinds(interpret, program)
    assert [op.gate for op in linears(interpret, program)] == ["none"] * 4 + [kind, "none", "none"]
    assert compare(model, program) < 1e-5


@pytest.mark.parametrize(
    ("activation", "extra"),
    [(lambda g, x: g.op("Tanh", x), None), (lambda g, x: x, None), (ACTIVATIONS["silu"], "gate is read again")],
    ids=["not-a-gate", "no-activation", "read-again"],
)
def test_other_products_stay_elementwise(small_graph, lowered, compare, interpret, activation, extra):
    model = small_graph(after=gated_mlp(activation, extra=extra)).model
    program = lowered(model)
    assert kinds(interpret, program).count("elementwise") == 1
    assert {op.gate for op in linears(interpret, program)} == {"none"}
    assert compare(model, program) < 1e-5


def test_gate_and_up_apart_stay_two_products(small_graph, lowered, compare, interpret):
    def edit(g, x):
        gate, up = (g.op("MatMul", x, g.weight(name, 32, 32)) for name in ("gate", "up"))
        return g.op("Mul", ACTIVATIONS["silu"](g, gate), up)

    model = small_graph(before=edit).model
    program = lowered(model)
    (op,) = (op for op in interpret.Interpreter(program).program.ops if op.op == "elementwise")
    assert [step.op for step in op.steps] == ["rows", "silu", "rows", "mul"]
    assert compare(model, program) < 1e-5


def test_a_bias_and_a_residual_end_the_product(small_graph, lowered, compare, interpret):
    def edit(g, x):
        y = g.op("Add", g.weight("bias", 32), g.op("MatMul", x, g.weight("w", 32, 32)))
        return g.op("Add", y, x)

    model = small_graph(before=edit).model
    program = lowered(model)
    first = linears(interpret, program)[0]
    assert first.bias == "bias"
    assert first.residual is not None
    assert "elementwise" not in kinds(interpret, program)
    assert compare(model, program) < 1e-5


def test_a_product_does_not_write_over_what_it_reads(small_graph, lowered, compare, interpret):
    model = small_graph(before=lambda g, x: g.op("Add", x, g.op("MatMul", x, g.weight("w", 32, 32)))).model
    program = lowered(model)
    first = linears(interpret, program)[0]
    assert first.x == first.residual != first.out
    assert compare(model, program) < 1e-5


def test_a_value_read_twice_is_not_swallowed(small_graph, lowered, compare, interpret):
    def edit(g, x):
        y = g.op("MatMul", x, g.weight("w", 32, 32))
        return g.op("Mul", g.op("Add", y, x), y)

    model = small_graph(before=edit).model
    program = lowered(model)
    assert linears(interpret, program)[0].residual is None
    assert compare(model, program) < 1e-5


def test_two_branches_are_added_by_the_later_one(small_graph, lowered, compare, interpret):
    def edit(g, x):
        first, second = (g.op("MatMul", x, g.weight(name, 32, 32)) for name in ("a", "b"))
        return g.op("Add", x, g.op("Add", second, first))

    model = small_graph(before=edit).model
    program = lowered(model)
    first, second = linears(interpret, program)[:2]
    assert first.residual is None
    assert second.residual is not None
    assert compare(model, program) < 1e-5


def test_one_bias_for_two_layers_is_packed_for_each(small_graph, lowered, compare, interpret):
    def edit(g, x):
        bias = g.weight("bias", 32)
        y = g.op("Add", g.op("MatMul", x, g.weight("a", 32, 32)), bias)
        return g.op("Mul", g.op("Add", g.op("MatMul", y, g.weight("b", 32, 32)), bias), bias)

    model = small_graph(before=edit).model
    program = lowered(model)
    assert [op.bias for op in linears(interpret, program)][:2] == ["bias.bias", "bias.bias2"]
    assert compare(model, program) < 1e-5


def test_the_scale_of_embeddings_is_theirs(small_graph, lowered, compare, interpret):
    model = small_graph(before=lambda g, x: g.op("Mul", x, g.scalar(3.5))).model
    program = lowered(model)
    embed = interpret.Interpreter(program).program.ops[0]
    assert embed.scale == 3.5
    assert "elementwise" not in kinds(interpret, program)
    assert compare(model, program) < 1e-5


def test_a_chain_is_one_operation_until_its_steps_run_out(small_graph, lowered, compare, interpret):
    def chain(length):
        def edit(g, x):
            for index in range(length):
                x = g.op("Tanh", g.op("Add", x, g.scalar(0.1 * index)))
            return x

        return edit

    model = small_graph(before=chain(8)).model
    program = lowered(model)
    assert kinds(interpret, program).count("elementwise") == 1
    assert compare(model, program) < 1e-5
    model = small_graph(before=chain(20)).model
    program = lowered(model)
    long = [op for op in interpret.Interpreter(program).program.ops if op.op == "elementwise"]
    assert len(long) == 2
    assert max(len(op.steps) for op in long) <= MAX_ELEMENTWISE_STEPS
    assert compare(model, program) < 1e-5


def test_logits_are_capped_in_place(small_graph, lowered, compare, interpret):
    def head(g, x):
        y = g.op("MatMul", x, g.weight("head", 32, 40))
        return g.op("Mul", g.op("Tanh", g.op("Div", y, g.scalar(3.0))), g.scalar(3.0))

    model = small_graph(head=head).model
    program = lowered(model)
    run = interpret.Interpreter(program).program
    assert run.ops[-1].op == "elementwise"
    assert run.ops[-1].out == run.ops[-1].inputs[0]
    assert run.ops[-1].out.buffer == run.logits
    assert compare(model, program) < 1e-5


def test_logits_that_are_columns_are_copied_out(small_graph, lowered, compare, interpret):
    def head(g, x):
        return g.op("Slice", g.op("MatMul", x, g.weight("head", 32, 72)), g.ints(16), g.ints(56), g.ints(2))

    model = small_graph(head=head).model
    program = lowered(model)
    assert kinds(interpret, program)[-1] == "elementwise"
    assert compare(model, program) < 1e-5


def test_what_follows_the_last_attention_is_computed_for_few_rows(small_graph, lowered, compare, interpret):
    def edit(g, x):
        return g.op("MatMul", g.op("Tanh", g.op("MatMul", x, g.weight("up", 32, 64))), g.weight("down", 64, 32))

    model = small_graph(after=edit).model
    program = lowered(model)
    run = interpret.Interpreter(program).program
    rows = {op.name: run.buffers[op.out.buffer].rows for op in run.ops if op.op == "linear"}
    assert rows == dict.fromkeys("qkv", "tokens") | dict.fromkeys(("o", "up", "down", "head"), "logits")
    assert compare(model, program) < 1e-5


def test_nodes_nobody_reads_leave_no_trace(small_graph, lowered, interpret):
    def edit(g, x):
        g.op("Tanh", g.op("MatMul", x, g.weight("unused", 32, 32)))
        return x

    program = lowered(small_graph(before=edit).model)
    assert "unused" not in program.program["weights"]
    assert not any("unused" in tensor.name for tensor in program.tensors)


def test_tensors_are_loaded_when_written_and_not_before(small_graph, lowered, interpret):
    program = lowered(small_graph().model)
    table = next(tensor for tensor in program.tensors if tensor.name == "weights/embed")
    np.testing.assert_array_equal(table.load(), table.load())
    assert (table.dtype, table.shape) == ("F32", (40, 32))
