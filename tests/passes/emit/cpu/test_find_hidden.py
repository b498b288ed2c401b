"""Hidden states: what the head multiplies is answered too, and nothing else changes."""

import numpy as np
import pytest

from optimc.errors import LoweringError
from optimc.plan.cpu_program import CpuProgram
from optimc_passes.graph.attach import attach_weights

TOKENS, ROWS = np.random.default_rng(5).integers(0, 32, 12), np.array([2, 11, 2, 0])


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("int8", [None, False])
def test_hidden_times_the_head_is_the_logits(tiny_decoder, quantized, lowered, interpret, rounded, tied, int8):
    decoder = tiny_decoder(tied=tied)
    names = [name for name in decoder.arrays if "proj" in name or "lm_head" in name] if rounded else []
    store = decoder.store.replace({name: quantized(decoder.arrays[name]) for name in names})
    model = attach_weights(decoder.model, store)
    plain = lowered(model, int8_activations=int8)
    answering = lowered(model, int8_activations=int8, hidden=True)
    program = CpuProgram.model_validate(answering.program)
    assert interpret.memory_faults(program) == []
    with_hidden, without = interpret.Interpreter(answering), interpret.Interpreter(plain)
    logits = with_hidden.run(TOKENS, ROWS)
    np.testing.assert_array_equal(logits, without.run(TOKENS, ROWS))
    head = store["model.embed_tokens.weight" if tied else "lm_head.weight"]
    matrix = head.dequantize() if rounded and not tied else head.read()
    tolerance = 2e-3 if rounded and int8 is None else 1e-5  # what two terms of 8 bits leave
    assert np.abs(with_hidden.hidden @ matrix.T - logits).max() < tolerance * np.abs(logits).max()


def test_a_reordered_head_answers_features_as_they_were(tiny_decoder, quantized, lowered, interpret):
    decoder = tiny_decoder(tied=False)
    order = np.random.default_rng(2).permutation(decoder.hidden).astype(np.int32)
    head = quantized(decoder.arrays["lm_head.weight"], permutation=order)
    model = attach_weights(decoder.model, decoder.store.replace({"lm_head.weight": head}))
    run = interpret.Interpreter(lowered(model, hidden=True, int8_activations=False))
    logits = run.run(TOKENS, ROWS)
    np.testing.assert_allclose(run.hidden @ head.dequantize().T, logits, rtol=1e-4, atol=1e-4)


def test_programs_without_it_say_nothing_of_it(tiny_decoder, lowered):
    decoder = tiny_decoder()
    model = attach_weights(decoder.model, decoder.store)
    program = lowered(model).program
    assert program["version"] == 1
    assert not {"hidden", "heads"} & set(program)
    assert lowered(model, hidden=True).program["version"] == 2


def test_norms_of_layers_keep_a_quantized_buffer_that_threads_may_copy(tiny_decoder, quantized, lowered):
    """The last norm writes floats too, so its codes must lie in a buffer that no other norm writes."""
    decoder = tiny_decoder(tied=False)
    names = [name for name in decoder.arrays if "proj" in name or "lm_head" in name]
    store = decoder.store.replace({name: quantized(decoder.arrays[name]) for name in names})
    program = CpuProgram.model_validate(lowered(attach_weights(decoder.model, store), hidden=True).program)
    norms = [op for op in program.ops if op.op == "norm" and op.quantized is not None]
    beside_floats = {op.quantized for op in norms if op.out is not None}
    assert len(beside_floats) == 1
    assert not beside_floats & {op.quantized for op in norms if op.out is None}


def test_the_check_finds_hidden_states_written_over(tiny_decoder, lowered, interpret):
    decoder = tiny_decoder()
    model = attach_weights(decoder.model, decoder.store)
    program = CpuProgram.model_validate(lowered(model, hidden=True).program)
    hidden, logits = program.buffers[program.hidden.buffer], program.buffers[program.logits]
    buffers = [replace_offset(buffer, hidden.offset) if buffer is logits else buffer for buffer in program.buffers]
    assert interpret.memory_faults(program.model_copy(update={"buffers": tuple(buffers)}))


def replace_offset(buffer, offset):
    return buffer.model_copy(update={"offset": offset})


def test_logits_from_elsewhere_are_refused_only_if_hidden_is_wanted(small_graph, lowered, compare):
    def head(g, x):
        both = [g.op("MatMul", x, g.weight(name, g.hidden, g.vocab)) for name in ("one", "other")]
        return g.op("Mul", *both)

    model = small_graph(head=head).model
    assert compare(model, lowered(model)) < 1e-5
    with pytest.raises(LoweringError, match=r"hidden states are asked for, and the logits come from no linear layer"):
        lowered(model, hidden=True)


def test_what_lies_behind_the_head_is_passed_over(small_graph, lowered, compare, interpret):
    def head(g, x):
        logits = g.op("Div", g.op("MatMul", x, g.weight("head", g.hidden, g.vocab)), g.scalar(4.0))
        return g.op("Mul", g.op("Tanh", logits), g.scalar(4.0))

    graph = small_graph(head=head)
    program = lowered(graph.model, hidden=True)
    assert compare(graph.model, program) < 1e-5
    run = interpret.Interpreter(program)
    logits = run.run(TOKENS, ROWS)
    weight = graph.model.graph.initializers["head"].const_value.numpy()
    np.testing.assert_allclose(4 * np.tanh(run.hidden @ weight / 4), logits, rtol=1e-4, atol=1e-4)
